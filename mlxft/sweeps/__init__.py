"""`mlxft train -m`: many runs from one command, each a process of its own, all checked before the first.

`grid` reads which keys vary, `store` keeps what is known of a sweep on disk, `search` says which job comes
next, `launch` where it runs, `controller` brings them together.
"""
