#include "runtime.h"
namespace simt {
void end_trace() {}
void trace(Fiber*, const void*, unsigned, int, int, Site) {}
}
