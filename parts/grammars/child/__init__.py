"""A frontend's helper process that reads grammars: they are programs that clients write, and it may be killed."""
