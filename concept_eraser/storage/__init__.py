"""Files and folders: the only part of the package that opens a file of a user's for reading or
writing.

* `readers`: one guarded reader for each kind of file. Size, depth and kind are checked before the
content is used.
* `writers`: files, appended lines and folders. A file writer never removes a folder.
* `manifest`: the mark of a folder of ours, with the SHA-256 of each file that we wrote there.
* `locks`: one process at a time in an output folder.
* `digests`: SHA-256 of files, tensors and nested values.

`tests/test_layers.py` holds the rest of the package to this.
"""
