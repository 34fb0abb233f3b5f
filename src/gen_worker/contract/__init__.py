"""What crosses a process line, and what both packages may import: documents, the job, the contract file, the lease,
checkpoint metas, files, process identity, secrets, failpoints. Imports nothing else of ours but `gen_worker.errors`.
"""
