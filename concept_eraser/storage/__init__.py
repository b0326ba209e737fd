"""Files and folders. Only this part of the package opens files for reading or writing.

* `readers`: one guarded reader for each kind of file. Size, depth and kind are checked before the
  content is used.
* `writers`: files, appended lines and folders. A file writer never removes a folder.
* `manifest`: the mark of a folder of this package, with the SHA-256 of each file that it wrote
  there.
* `locks`: one process at a time in an output folder.
* `digests`: SHA-256 of files, tensors and nested values.

`tests/test_layers.py` checks that no other part opens files.
"""
