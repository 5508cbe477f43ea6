"""Which errors a route may answer with, for the API's description."""

GENERATES = (400, 404, 409, 413, 415, 429, 500, 503, 504)
READS_BODY = (400, 404, 413, 415, 429, 500, 504)
LOOKS_UP = (404, 500)
