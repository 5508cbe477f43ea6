"""A frontend's helper process that reads images: it runs what clients send, and may be killed."""
