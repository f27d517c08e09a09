"""Runs in object storage: `output: s3://BUCKET/RUN` and `run.init_from: s3://BUCKET/RUN`."""
