"""A key-value store in one process of a job, for all processes that know the secret of the job."""
