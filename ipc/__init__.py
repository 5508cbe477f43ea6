"""What crosses a process border: message structs, codec, channels, addresses, process habits."""
