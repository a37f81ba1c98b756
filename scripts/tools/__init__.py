"""What the scripts beside this folder share: figures of an accelerator, compiled programs, int8."""
