"""Images in a frontend: from addresses and base64 to pixel values in shared memory, and places in prompts."""

from penstock.parts.images.frontend.part import Images

PARTS = (Images,)
