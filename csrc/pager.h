// The pager: carries out, for one engine, what its cache manager plans. See oled_jax/offload/carriers/native.py.
//
// During a pass XLA's thread calls route, land and collect, once or more per layer, in this order.
// A feeder thread moves pages that were asked for ahead of their use, while nothing else waits.

#pragma once

#include <nanobind/nanobind.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "link.h"

namespace oled_jax {

// Where the fields of a plan lie, in the order of PLAN_FIELDS in carriers/native.py.
struct PlanOffsets {
  int64_t num_rounds, cpu_pairs, hit_end, transfer_end, item_end, transfer_expert, transfer_slot;
  int64_t item_slot;
  int64_t prefetch_count, prefetch_layer, prefetch_expert, prefetch_slot;
};
constexpr size_t kPlanFields = sizeof(PlanOffsets) / sizeof(int64_t);

// One layer's page arrays in host memory: [experts, 2F, D] and [experts, D, F].
struct LayerStore {
  const char* gate_up;
  const char* down;
};

// What XLA passes to `route`. Pointers are to device memory.
struct RouteCall {
  int layer;
  const void* packed;  // int32 [tokens, columns]: expert ids, then the gates' bits
  size_t tokens, columns;
  const void* hidden;  // [tokens, hidden_bytes], or null if the CPU computes nothing in this pass
  size_t hidden_bytes;
  int32_t* plan;
  size_t plan_size;
  PlanOffsets offsets;
};

// Microseconds and bytes since the pager was made.
struct PagerStatistics {
  uint64_t routes = 0;
  double transport_us = 0;  // from the call to the router's result on the host, less accounting: waits for the device
  double accounting_us = 0;  // the manager counts a layer meanwhile, the wait for the GIL included
  double planning_us = 0;   // inside the cache manager, the wait for the GIL included
  double issue_us = 0;      // putting the plan and its pages on the streams
  double collect_us = 0;    // waiting for the CPU's share
  double moved_us = 0;      // page copies on the link, demanded ones only
  uint64_t moved_bytes = 0;
  uint64_t ahead_bytes = 0;     // moved ahead of use
  uint64_t cancelled_pages = 0;  // asked for ahead of use, and dropped before they moved
};

class Pager {
 public:
  // manager: a CacheManager (on_route, account, collect), None if nothing runs passes. dtype: the pages'.
  Pager(std::unique_ptr<Link> link, std::vector<LayerStore> store, size_t gate_up_bytes,
        size_t down_bytes, nanobind::object manager, nanobind::object dtype);
  ~Pager();
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  // From now on the pool lies here. Calls of XLA find their pager by the address of `gate_up`.
  void attach(char* gate_up, char* down, size_t slots);
  // The pager of the pool at this address. Throws std::runtime_error if there is none.
  static Pager& at(const void* gate_up);

  void route(Stream stream, const RouteCall& call);
  void land(Stream stream);
  void collect(Stream stream, int layer, float* share, size_t tokens, size_t width);

  // Asks for pages ahead of their use, between passes.
  void stage(int layer, const std::vector<int>& experts, const std::vector<int>& slots);
  // Waits until every page that was asked for has arrived.
  void drain();
  // Forgets what was asked for and waits for what moves. The pool may then be freed.
  void reset();
  PagerStatistics statistics();

 private:
  struct Move {
    int layer, expert, slot;
  };
  // The plan that is being carried out. Pointers are into `outbox_`.
  struct Current {
    int layer = -1;
    int rounds = 0;
    int cpu_pairs = 0;
    int hit_end = 0;  // items before it need no transfer of this plan
    const int32_t *transfer_end, *item_end, *transfer_expert, *transfer_slot, *item_slot;
    int issued = 0;  // rounds whose pages are on their way
    int landed = 0;  // rounds that XLA's stream waits for
  };
  struct Views {
    nanobind::object packed, hidden;
  };
  struct Buffer {
    char* data = nullptr;
    size_t size = 0;
  };

  using Queue = std::deque<Move>;

  void reserve(Buffer& buffer, size_t bytes);
  const Views& views(const RouteCall& call);
  double account();
  void plan(const RouteCall& call);
  void read_plan(const RouteCall& call);
  void mark_busy();
  void clear_busy();
  void issue(Stream stream, int round);
  bool overlaps(int round, int busy) const;
  void move_page(const Move& move);
  Queue::iterator movable();
  Queue::iterator waiting_for(int slot);
  Ticket move_now(Queue::iterator move);
  void ask_ahead(const Move& move);
  void cancel(int slot);
  void require_hits(Stream stream);
  void feed();
  void raise_feeder_failure();
  void detach() noexcept;

  std::unique_ptr<Link> link_;
  const std::vector<LayerStore> store_;
  const size_t gate_up_bytes_, down_bytes_;
  nanobind::object manager_, dtype_;
  Buffer inbox_, outbox_, share_;
  std::unordered_map<size_t, Views> views_;
  Current current_;
  std::vector<Ticket> round_tickets_;

  // Shared with the feeder; never taken while the GIL is awaited.
  std::mutex mutex_;
  std::condition_variable wanted_;
  char *pool_gate_up_ = nullptr, *pool_down_ = nullptr;
  Queue ahead_;
  std::deque<Ticket> flying_;
  std::vector<char> waiting_;          // by slot: a page for it is in `ahead_`
  std::vector<int> busy_;              // slots that the layer in hand computes with
  std::vector<char> is_busy_;          // the same by slot
  std::vector<Ticket> slot_tickets_;   // by slot: when the last page moved ahead has arrived
  std::exception_ptr feeder_failure_;
  PagerStatistics statistics_;
  bool closing_ = false;
  std::thread feeder_;
};

}  // namespace oled_jax
