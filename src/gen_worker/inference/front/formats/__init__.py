"""How requests write rows and answers: JSON, Arrow IPC, the Open Inference Protocol; and the OpenAPI document of it."""
