"""A key-value store in one process of a job, for all that know the job's secret."""
