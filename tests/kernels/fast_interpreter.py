"""Triton's interpreter, without the set-up that it repeats at every call of a device function."""

from triton.runtime import interpreter


def speed_up_interpreter() -> None:
    """Let nested device functions skip a repeated set-up.

    The interpreter patches `triton.language` again at every call of a device function, `tl.max` included, which
    takes most of its time. Once per module is enough: only a launch from the host undoes a patch, and it
    does so for `triton.language` itself, which that launch has patched before.
    """
    patched: set[str] = set()

    def call(self: interpreter.InterpretedFunction, *args: object, **kwargs: object) -> object:
        module = self.fn.__module__
        if module.startswith("triton.") and module not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(module)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
