"""`norm`: root mean square norms, a file a backend."""
