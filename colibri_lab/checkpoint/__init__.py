"""Hugging Face checkpoint → container → arrays.

`families` reads a checkpoint's settings and tensor names, `source` its bytes, `formats` knows the number formats,
`container` the files on disk, `convert` goes from the first to the last and `validate` checks what is there.
"""
