from tests.heap import small_heap

__all__ = ["small_heap"]
