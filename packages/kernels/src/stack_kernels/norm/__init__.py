"""`norm`: root mean square norms, one file per backend."""
