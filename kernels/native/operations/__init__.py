"""The operations of programs: in C++, and as structs."""
