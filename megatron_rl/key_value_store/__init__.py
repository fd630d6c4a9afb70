"""A key-value store in the memory of one process of a job. All processes that know the job's secret can use it."""
