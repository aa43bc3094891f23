#include "pager.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <unordered_set>

namespace nb = nanobind;

namespace oled_jax {
namespace {

// Pages moved ahead of use that may be on the link at once: a demanded page waits behind them.
constexpr size_t kFlying = 2;
constexpr auto kFeederPause = std::chrono::microseconds(40);

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

std::mutex registry_mutex;
std::unordered_map<const void*, Pager*> registry;

size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Pager::Pager(std::unique_ptr<Link> link, std::vector<LayerStore> store, size_t gate_up_bytes,
             size_t down_bytes, nb::object manager, nb::object dtype)
    : link_(std::move(link)),
      store_(std::move(store)),
      gate_up_bytes_(gate_up_bytes),
      down_bytes_(down_bytes),
      manager_(std::move(manager)),
      dtype_(std::move(dtype)),
      feeder_([this] { feed(); }) {}

Pager::~Pager() {
  detach();
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  wanted_.notify_all();
  feeder_.join();
  try {
    link_->drain();
  } catch (const std::exception&) {
    // The device is lost; there is nobody left to tell.
  }
  for (Buffer* buffer : {&inbox_, &outbox_, &share_}) {
    if (buffer->data != nullptr) link_->release(buffer->data);
  }
}

void Pager::attach(char* gate_up, char* down, size_t slots) {
  reset();
  detach();
  std::scoped_lock lock(mutex_, registry_mutex);
  pool_gate_up_ = gate_up;
  pool_down_ = down;
  waiting_.assign(slots, 0);
  is_busy_.assign(slots, 0);
  busy_.clear();
  slot_tickets_.assign(slots, 0);
  registry[gate_up] = this;
}

void Pager::detach() noexcept {
  std::lock_guard lock(registry_mutex);
  auto found = registry.find(pool_gate_up_);
  if (found != registry.end() && found->second == this) registry.erase(found);
}

Pager& Pager::at(const void* gate_up) {
  std::lock_guard lock(registry_mutex);
  auto found = registry.find(gate_up);
  if (found == registry.end()) {
    throw std::runtime_error("no engine's pool lies where this program reads pages: XLA copied it");
  }
  return *found->second;
}

void Pager::route(Stream stream, const RouteCall& call) {
  auto start = Clock::now();
  link_->enter();
  size_t packed_bytes = call.tokens * call.columns * sizeof(int32_t);
  reserve(inbox_, aligned(packed_bytes) + call.tokens * call.hidden_bytes);
  reserve(outbox_, call.plan_size * sizeof(int32_t));
  link_->to_host(stream, inbox_.data, call.packed, packed_bytes);
  if (call.hidden != nullptr) {
    link_->to_host(stream, inbox_.data + aligned(packed_bytes), call.hidden,
                   call.tokens * call.hidden_bytes);
  }
  double counting_us = link_->runs_beside_the_host() ? account() : 0;
  link_->synchronize(stream);
  statistics_.accounting_us += counting_us;
  statistics_.transport_us += microseconds_since(start) - counting_us;

  auto arrived = Clock::now();
  plan(call);
  statistics_.planning_us += microseconds_since(arrived);

  auto planned = Clock::now();
  {
    std::lock_guard lock(mutex_);
    raise_feeder_failure();
    if (double micros = link_->timed_us(); micros >= 0) statistics_.moved_us += micros;
    read_plan(call);
    clear_busy();  // the layer before is done: its stream has just been waited for
    mark_busy();
    // First the hits: a round of this plan may drop one and take its slot, and then what was asked
    // for there must still arrive before.
    require_hits(stream);
    // All rounds at once: what this plan asks for ahead may take the slot of a page that one of its
    // own rounds computes with and drops.
    int transfers = current_.rounds > 0 ? current_.transfer_end[current_.rounds - 1] : 0;
    for (int i = 0; i < transfers; ++i) cancel(current_.transfer_slot[i]);
    link_->to_device(stream, call.plan, outbox_.data, call.plan_size * sizeof(int32_t));
    if (current_.rounds > 0) issue(stream, 0);
    auto plan = reinterpret_cast<const int32_t*>(outbox_.data);
    for (int i = 0; i < plan[call.offsets.prefetch_count]; ++i) {
      ask_ahead({plan[call.offsets.prefetch_layer + i], plan[call.offsets.prefetch_expert + i],
                 plan[call.offsets.prefetch_slot + i]});
    }
    ++statistics_.routes;
  }
  wanted_.notify_one();
  statistics_.issue_us += microseconds_since(planned);
}

// Has the manager count what it planned last, while the device comes as far as this layer. Microseconds.
double Pager::account() {
  auto start = Clock::now();
  nb::gil_scoped_acquire gil;
  manager_.attr("account")();
  return microseconds_since(start);
}

// Asks the manager. Leaves its plan in the outbox.
void Pager::plan(const RouteCall& call) {
  nb::gil_scoped_acquire gil;
  const Views& given = views(call);
  nb::object answer = manager_.attr("on_route")(call.layer, given.packed, given.hidden);
  auto flat = nb::cast<nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>>(answer);
  if (flat.size() != call.plan_size) {
    throw std::runtime_error("the manager's plan has " + std::to_string(flat.size()) +
                             " entries, the program expects " + std::to_string(call.plan_size));
  }
  std::memcpy(outbox_.data, flat.data(), call.plan_size * sizeof(int32_t));
}

// NumPy arrays over the inbox, made once for each shape of a pass.
const Pager::Views& Pager::views(const RouteCall& call) {
  Views& found = views_[2 * call.tokens + (call.hidden != nullptr)];
  if (!found.packed.is_valid()) {
    size_t shape[] = {call.tokens, call.columns};
    // The memory is the pager's; `none` as owner keeps NumPy from copying it.
    found.packed = nb::cast(nb::ndarray<nb::numpy, int32_t>(inbox_.data, 2, shape, nb::none()));
    found.hidden = nb::none();
    if (call.hidden != nullptr) {
      char* data = inbox_.data + aligned(call.tokens * call.columns * sizeof(int32_t));
      size_t bytes[] = {call.tokens, call.hidden_bytes};
      nb::object raw = nb::cast(nb::ndarray<nb::numpy, uint8_t>(data, 2, bytes, nb::none()));
      found.hidden = raw.attr("view")(dtype_);
    }
  }
  return found;
}

void Pager::read_plan(const RouteCall& call) {
  auto plan = reinterpret_cast<const int32_t*>(outbox_.data);
  const PlanOffsets& at = call.offsets;
  current_.layer = call.layer;
  current_.rounds = plan[at.num_rounds];
  current_.cpu_pairs = plan[at.cpu_pairs];
  current_.hit_end = plan[at.hit_end];
  current_.transfer_end = plan + at.transfer_end;
  current_.item_end = plan + at.item_end;
  current_.transfer_expert = plan + at.transfer_expert;
  current_.transfer_slot = plan + at.transfer_slot;
  current_.item_slot = plan + at.item_slot;
  current_.issued = current_.landed = 0;
  round_tickets_.assign(current_.rounds, 0);
}

void Pager::mark_busy() {
  int items = current_.rounds > 0 ? current_.item_end[current_.rounds - 1] : 0;
  busy_.assign(current_.item_slot, current_.item_slot + items);
  for (int slot : busy_) is_busy_[slot] = 1;
}

void Pager::clear_busy() {
  for (int slot : busy_) is_busy_[slot] = 0;
  busy_.clear();
}

// Puts a round's pages on the link. The slots are free once `stream` has come this far.
void Pager::issue(Stream stream, int round) {
  if (round > 0) link_->move_after(stream);
  int begin = round > 0 ? current_.transfer_end[round - 1] : 0;
  int end = current_.transfer_end[round];
  // One round is timed for each layer: events are not free, and decoding has one.
  if (round == 0 && end > begin) link_->start_timing();
  for (int i = begin; i < end; ++i) {
    Move move{current_.layer, current_.transfer_expert[i], current_.transfer_slot[i]};
    move_page(move);
  }
  if (round == 0 && end > begin) {
    link_->stop_timing();
    statistics_.moved_bytes += (end - begin) * (gate_up_bytes_ + down_bytes_);
  }
  round_tickets_[round] = link_->mark();
  current_.issued = round + 1;
}

// Whether a round's pages would overwrite slots that round `busy` computes with.
bool Pager::overlaps(int round, int busy) const {
  int first = busy > 0 ? current_.item_end[busy - 1] : 0;
  std::unordered_set<int> used(current_.item_slot + first,
                               current_.item_slot + current_.item_end[busy]);
  return std::any_of(current_.transfer_slot + current_.transfer_end[round - 1],
                     current_.transfer_slot + current_.transfer_end[round],
                     [&](int slot) { return used.count(slot) > 0; });
}

void Pager::land(Stream stream) {
  link_->enter();
  std::lock_guard lock(mutex_);
  int round = current_.landed++;
  if (round >= current_.rounds) return;  // a plan that does nothing
  if (current_.issued == round) issue(stream, round);
  link_->await(stream, round_tickets_[round]);
  // The next round's pages move while this round computes, unless they need its slots.
  if (round + 1 < current_.rounds && !overlaps(round + 1, round)) issue(stream, round + 1);
}

void Pager::collect(Stream stream, int layer, float* share, size_t tokens, size_t width) {
  link_->enter();
  size_t bytes = tokens * width * sizeof(float);
  if (current_.cpu_pairs == 0) {
    link_->clear(stream, share, bytes);
    return;
  }
  auto start = Clock::now();
  reserve(share_, bytes);
  {
    nb::gil_scoped_acquire gil;
    nb::object answer = manager_.attr("collect")(layer, nb::make_tuple(tokens, width));
    auto rows = nb::cast<nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>>(answer);
    if (rows.size() != tokens * width) throw std::runtime_error("the CPU's share has another shape");
    std::memcpy(share_.data, rows.data(), bytes);
  }
  statistics_.collect_us += microseconds_since(start);
  link_->to_device(stream, share, share_.data, bytes);
}

void Pager::stage(int layer, const std::vector<int>& experts, const std::vector<int>& slots) {
  {
    std::lock_guard lock(mutex_);
    raise_feeder_failure();
    clear_busy();
    for (size_t i = 0; i < experts.size(); ++i) ask_ahead({layer, experts[i], slots[i]});
  }
  wanted_.notify_one();
}

void Pager::drain() {
  std::lock_guard lock(mutex_);
  raise_feeder_failure();
  link_->enter();
  clear_busy();
  while (!ahead_.empty()) move_now(ahead_.begin());
  link_->drain();
}

void Pager::reset() {
  std::lock_guard lock(mutex_);
  ahead_.clear();
  flying_.clear();
  std::fill(waiting_.begin(), waiting_.end(), 0);
  clear_busy();
  current_ = Current();
  link_->drain();
  feeder_failure_ = nullptr;
}

PagerStatistics Pager::statistics() {
  std::lock_guard lock(mutex_);
  return statistics_;
}

void Pager::reserve(Buffer& buffer, size_t bytes) {
  if (buffer.size >= bytes) return;
  if (&buffer == &inbox_) {
    nb::gil_scoped_acquire gil;
    views_.clear();
  }
  if (buffer.data != nullptr) link_->release(buffer.data);
  buffer = {};
  buffer.data = static_cast<char*>(link_->allocate(bytes));
  buffer.size = bytes;
}

void Pager::move_page(const Move& move) {
  const LayerStore& source = store_[move.layer];
  link_->move(pool_gate_up_ + move.slot * gate_up_bytes_,
              source.gate_up + move.expert * gate_up_bytes_, gate_up_bytes_);
  link_->move(pool_down_ + move.slot * down_bytes_, source.down + move.expert * down_bytes_,
              down_bytes_);
}

// The first page asked for ahead whose slot nobody computes with. A slot is free for the manager when
// the layer in hand is the last to use it, and for the link when that layer is done.
Pager::Queue::iterator Pager::movable() {
  return std::find_if(ahead_.begin(), ahead_.end(),
                      [this](const Move& move) { return !is_busy_[move.slot]; });
}

Pager::Queue::iterator Pager::waiting_for(int slot) {
  return std::find_if(ahead_.begin(), ahead_.end(),
                      [slot](const Move& move) { return move.slot == slot; });
}

// Puts a page that was asked for ahead on the link.
Ticket Pager::move_now(Queue::iterator waiting) {
  Move move = *waiting;
  ahead_.erase(waiting);
  waiting_[move.slot] = 0;
  move_page(move);
  statistics_.ahead_bytes += gate_up_bytes_ + down_bytes_;
  return slot_tickets_[move.slot] = link_->mark();
}

void Pager::ask_ahead(const Move& move) {
  cancel(move.slot);
  waiting_[move.slot] = 1;
  ahead_.push_back(move);
}

// Drops a page that waits for this slot: the slot has been given to another one.
void Pager::cancel(int slot) {
  if (!waiting_[slot]) return;
  waiting_[slot] = 0;
  ahead_.erase(waiting_for(slot));
  ++statistics_.cancelled_pages;
}

// Resident pages that this layer computes with and that were asked for ahead: those that have not
// moved yet move now, and XLA's stream waits for those on their way.
void Pager::require_hits(Stream stream) {
  Ticket last = 0;
  for (int i = 0; i < current_.hit_end; ++i) {
    int slot = current_.item_slot[i];
    if (waiting_[slot]) move_now(waiting_for(slot));
    last = std::max(last, slot_tickets_[slot]);
  }
  if (last > 0) link_->await(stream, last);
}

void Pager::feed() {
  std::unique_lock lock(mutex_);
  while (true) {
    wanted_.wait(lock, [this] { return closing_ || movable() != ahead_.end(); });
    if (closing_) return;
    try {
      link_->enter();
      while (!flying_.empty() && link_->reached(flying_.front())) flying_.pop_front();
      if (flying_.size() < kFlying) {
        flying_.push_back(move_now(movable()));
        continue;
      }
    } catch (const std::exception&) {
      feeder_failure_ = std::current_exception();
      ahead_.clear();
      continue;
    }
    lock.unlock();
    std::this_thread::sleep_for(kFeederPause);
    lock.lock();
  }
}

void Pager::raise_feeder_failure() {
  if (feeder_failure_ == nullptr) return;
  std::exception_ptr failure = feeder_failure_;
  feeder_failure_ = nullptr;
  std::rethrow_exception(failure);
}

}  // namespace oled_jax
