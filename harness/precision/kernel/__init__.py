"""The cast as one fused C++ pass on a CPU: compiled at first use, loaded by ctypes."""
