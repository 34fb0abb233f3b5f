"""Bytes to and from other machines: retries, downloads, object stores, the lanes of an upload."""
