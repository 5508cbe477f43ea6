"""The bundled demo model: the text it learns, the script that trains it, and the result in `model/`."""
