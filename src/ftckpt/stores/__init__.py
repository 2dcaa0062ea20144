"""Where bytes rest: implementations of ``ports.BlobStore``. They know paths and bytes, never generations."""
