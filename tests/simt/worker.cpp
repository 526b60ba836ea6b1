// A process that runs launches under AddressSanitizer or ThreadSanitizer, whose libraries must be there from the start.
//
// Reads commands from its standard input and answers on its standard output (worker.py is the other side): load a kernel, or run
// one over copies of the launch's arrays. Each array is an allocation of its own, with red zones around it and the alignment it
// has in the test. A sanitizer that finds something writes its report to the standard error and ends the process.
#include <dlfcn.h>
#include <stdlib.h>
#include <unistd.h>

#include "runtime.h"

#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#endif

extern "C" int simt_launch(const simt::Launch* launch, char* error, unsigned error_bytes);

namespace {

int answers;  // file descriptor; the standard output itself goes where errors go, so that a printf does no harm

void get(void* to, size_t bytes) {
  for (auto p = static_cast<char*>(to); bytes;) {
    ssize_t n = read(0, p, bytes);
    if (n <= 0) _exit(0);
    p += n;
    bytes -= n;
  }
}
template <class T>
T get() {
  T value;
  get(&value, sizeof value);
  return value;
}
std::vector<char> get_bytes() {
  std::vector<char> bytes(get<unsigned>() + 1);  // zero-terminated
  get(bytes.data(), bytes.size() - 1);
  return bytes;
}
void put(const void* from, size_t bytes) {
  for (auto p = static_cast<const char*>(from); bytes;) {
    ssize_t n = write(answers, p, bytes);
    if (n <= 0) _exit(1);
    p += n;
    bytes -= n;
  }
}
template <class T>
void put(T value) {
  put(&value, sizeof value);
}

struct Kernel {
  void (*entry)(const void*);
  unsigned params_bytes;
  int max_threads;
};
std::vector<Kernel> kernels;

void load() {
  std::vector<char> path = get_bytes(), name = get_bytes();
  void* library = dlopen(path.data(), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    _exit(1);
  }
  auto symbol = [&](const char* prefix) {
    char text[256];
    snprintf(text, sizeof text, "%s%s", prefix, name.data());
    return dlsym(library, text);
  };
  kernels.push_back({reinterpret_cast<void (*)(const void*)>(symbol("simt_entry_")), *static_cast<unsigned*>(symbol("simt_size_")),
                     *static_cast<int*>(symbol("simt_bounds_"))});
  put(unsigned(kernels.size() - 1));
  put(kernels.back().params_bytes);
  put(kernels.back().max_threads);
}

char* allocate(size_t bytes) {
  void* memory;
  if (posix_memalign(&memory, 256, bytes)) _exit(1);
  return static_cast<char*>(memory);
}

struct Array {
  unsigned long long bytes;
  unsigned misaligned;  // address modulo 256
  char* allocation;
  char* data() const { return allocation + misaligned; }
};

void run() {
  simt::Launch launch = {};
  launch.entry = kernels[get<unsigned>()].entry;
  get(launch.grid, sizeof launch.grid);
  get(launch.block, sizeof launch.block);
  launch.shared_bytes = get<unsigned>();
  launch.copies = get<int>();
  launch.seed = get<unsigned long long>();
  launch.model = get<unsigned long long>();
  std::vector<char> received = get_bytes();
  std::vector<Array> arrays(get<unsigned>());
  for (Array& array : arrays) {
    array.bytes = get<unsigned long long>();
    array.misaligned = get<unsigned>();
    array.allocation = allocate(array.misaligned + array.bytes);
    get(array.data(), array.bytes);
#if defined(SIMT_ASAN)
    __asan_poison_memory_region(array.allocation, array.misaligned);
#endif
  }
  char* params = allocate(received.size() - 1);
  memcpy(params, received.data(), received.size() - 1);
  for (unsigned i = get<unsigned>(); i; --i) {  // pointers among the parameters
    auto offset = get<unsigned>(), array = get<unsigned>();
    char* address = arrays[array].data() + get<unsigned long long>();
    memcpy(params + offset, &address, sizeof address);
  }
  launch.params = params;
  char error[2048];
  int failed = simt_launch(&launch, error, sizeof error);
  put(failed);
  put(unsigned(strlen(error)));
  put(error, strlen(error));
  for (Array& array : arrays) {
    put(array.data(), array.bytes);
    free(array.allocation);
  }
  free(params);
  if (failed) _exit(0);  // threads were abandoned on their stacks: the next launch needs a fresh process
}

}  // namespace

int main() {
  answers = dup(1);
  dup2(2, 1);
  for (;;) get<unsigned>() ? run() : load();
}
