"""Downloads and uploads: retries, HTTP, object stores, the input cache, upload queues."""
