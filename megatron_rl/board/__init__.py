"""A board of values under keys in one process of a job, for all that know the job's secret."""
