// Splits a number of independent items over a few threads that live as long as the library.
#ifndef BATON_THREAD_POOL_H
#define BATON_THREAD_POOL_H

#include <cstddef>
#include <cstdint>

namespace baton {

typedef void (*ItemFunction)(void* context, int64_t item);

// Calls function(context, item) for each item in 0 .. num_items - 1 on up to num_threads threads, the caller's
// included, and returns when all are done. Items are handed out one by one. One call runs at a time.
void parallel_for(int64_t num_items, int num_threads, ItemFunction function, void* context);

// Memory of the calling thread, 64-byte aligned, at least so large; valid until the thread's next call.
void* thread_scratch(size_t size_bytes);

}  // namespace baton

#endif
