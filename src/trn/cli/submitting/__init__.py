"""A job before its submit: the file, its data, the disk, its code, variables and logs; and the report of it."""
