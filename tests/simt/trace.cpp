// Counts what the memory accesses of a traced launch cost, from the addresses that ran (checked build).
//
// Accesses of a warp's lanes belong to one request when they stem from the same instruction (return address), between the same
// two warp-wide operations, at the same repetition. A global request costs one unit per 32-byte sector it touches. A shared one
// is served in phases of 32, 16 or 8 lanes for accesses of up to 4, 8 and 16 bytes (a phase moves at most 128 bytes); a phase
// costs as many wavefronts as there are different 4-byte words in its busiest bank of 32.
#include <map>
#include <tuple>

#include "runtime.h"

namespace simt {

namespace {

struct Event {
  const void* key;
  uintptr_t address;
  Site site;
  unsigned warp, lane, epoch, bytes, repetition;
  int space, write;
};

struct Total {  // read by launcher.py
  const char* file;
  const void* key;
  int line, space, write;
  unsigned bytes;  // of one lane's access
  unsigned long long requests, accesses, units, ideal;
};

std::vector<Event> events;
std::vector<Total> totals;

unsigned long long sectors(const Event* begin, const Event* end, unsigned long long* ideal) {
  std::vector<uintptr_t> touched, words;
  for (const Event* e = begin; e != end; ++e) {
    for (uintptr_t s = e->address / 32; s <= (e->address + e->bytes - 1) / 32; ++s) touched.push_back(s);
    for (uintptr_t b = e->address; b < e->address + e->bytes; ++b) words.push_back(b);
  }
  auto distinct = [](std::vector<uintptr_t>& v) {
    std::sort(v.begin(), v.end());
    return static_cast<unsigned long long>(std::unique(v.begin(), v.end()) - v.begin());
  };
  *ideal = (distinct(words) + 31) / 32;
  return distinct(touched);
}

unsigned long long wavefronts(const Event* begin, const Event* end, unsigned long long* ideal) {
  unsigned bytes = begin->bytes, lanes = bytes <= 4 ? 32 : bytes <= 8 ? 16 : 8;
  unsigned long long total = 0;
  *ideal = 0;
  for (unsigned first = 0; first < 32; first += lanes) {
    std::vector<uintptr_t> banks[32];
    for (const Event* e = begin; e != end; ++e)
      if (e->lane >= first && e->lane < first + lanes)
        for (uintptr_t w = e->address / 4; w <= (e->address + bytes - 1) / 4; ++w) banks[w % 32].push_back(w);
    unsigned long long busiest = 0, all = 0;
    for (auto& words : banks) {
      std::sort(words.begin(), words.end());
      unsigned long long different = std::unique(words.begin(), words.end()) - words.begin();
      busiest = std::max(busiest, different);
      all += different;
    }
    total += busiest;
    *ideal += (all + 31) / 32;
  }
  return total;
}

auto request_of(const Event& e) { return std::make_tuple(e.warp, e.epoch, e.key, e.repetition); }

}  // namespace

void forget_trace() {
  events.clear();
  totals.clear();
}

void trace(Fiber* fiber, const void* address, unsigned bytes, int space, int write, Site site, const void* key) {
  if (!run.launch->traced) return;
  events.push_back({key, uintptr_t(address), site, fiber->warp, fiber->lane, fiber->epoch, bytes, 0, space, write});
}

void end_trace() {  // of a block
  auto lane_order = [](const Event& e) { return std::make_tuple(e.warp, e.epoch, e.key, e.lane); };
  std::stable_sort(events.begin(), events.end(), [=](auto& a, auto& b) { return lane_order(a) < lane_order(b); });
  for (size_t i = 1; i < events.size(); ++i)
    if (lane_order(events[i]) == lane_order(events[i - 1])) events[i].repetition = events[i - 1].repetition + 1;
  std::stable_sort(events.begin(), events.end(), [](auto& a, auto& b) { return request_of(a) < request_of(b); });
  for (size_t i = 0; i < events.size();) {
    size_t end = i + 1;
    while (end < events.size() && request_of(events[end]) == request_of(events[i])) ++end;
    const Event& e = events[i];
    unsigned long long ideal, units = e.space == kGlobal ? sectors(&events[i], &events[0] + end, &ideal)
                                                         : wavefronts(&events[i], &events[0] + end, &ideal);
    auto same = [&](const Total& t) { return t.key == e.key && t.space == e.space && t.write == e.write && t.bytes == e.bytes; };
    auto total = std::find_if(totals.begin(), totals.end(), same);
    if (total == totals.end())
      total = totals.insert(total, {e.site.file, e.key, e.site.line, e.space, e.write, e.bytes, 0, 0, 0, 0});
    ++total->requests;
    total->accesses += end - i;
    total->units += units;
    total->ideal += ideal;
    i = end;
  }
  events.clear();
}

extern "C" __attribute__((visibility("default"))) unsigned simt_trace(const Total** result) {
  *result = totals.data();
  return unsigned(totals.size());
}

}  // namespace simt
