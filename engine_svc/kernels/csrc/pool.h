// Threads that share the work of one call: parts are taken one by one, so a thread that the system delays is waited for
// only as long as its present part takes.
//
// Idle threads spin for some microseconds, which is longer than the pauses within a forward pass, and then sleep, so that
// they take nothing from other processes between steps. One call at a time; others wait for their turn.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "vec.h"

namespace takt {

TAKT_INLINE void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  // Threads in all, the caller's included. Called once, before the first work.
  void start(int threads) {
    for (int i = 1; i < threads; ++i) std::thread([this] { work(); }).detach();
    threads_ = threads;
  }

  int threads() const { return threads_; }

  std::mutex& turn() { return turn_; }

  // Calls body(part) for every part in [0, parts), in any order on any thread, and returns when all are done.
  template <class Body>
  void run(int parts, Body&& body) {
    if (parts <= 1 || threads_ == 1) {
      for (int i = 0; i < parts; ++i) body(i);
      return;
    }
    call_ = [](void* context, int part) { (*static_cast<std::remove_reference_t<Body>*>(context))(part); };
    context_ = const_cast<void*>(static_cast<const void*>(&body));
    done_.store(0, std::memory_order_relaxed);
    generation_ = (generation_ + 1) & 0xffffff;
    ticket_.store(generation_ << 40 | static_cast<uint64_t>(parts) << 20, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      wake_.fetch_add(1, std::memory_order_seq_cst);
      futex(FUTEX_WAKE_PRIVATE, threads_);
    }
    while (take_part()) {
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) != parts; ++spins) {
      relax();
      if (spins > 20000) sched_yield();
    }
  }

 private:
  static constexpr int kSpins = 4000;

  // Takes and does one part of the present call; false when none is left.
  bool take_part() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    if (index(ticket) >= count(ticket)) return false;
    ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    if (index(ticket) >= count(ticket)) return false;
    // A part that was taken keeps its call from ending, so these are the call's own.
    call_(context_, index(ticket));
    done_.fetch_add(1, std::memory_order_release);
    return true;
  }

  static int index(uint64_t ticket) { return static_cast<int>(ticket & 0xfffff); }
  static int count(uint64_t ticket) { return static_cast<int>(ticket >> 20 & 0xfffff); }

  void work() {
    while (true) {
      int spins = 0;
      while (!take_part() && ++spins < kSpins) relax();
      if (spins < kSpins) continue;
      int seen = wake_.load(std::memory_order_seq_cst);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
      if (index(ticket) >= count(ticket)) futex(FUTEX_WAIT_PRIVATE, seen);
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  void futex(int operation, int value) {
    syscall(SYS_futex, reinterpret_cast<int*>(&wake_), operation, value, nullptr, nullptr, 0);
  }

  int threads_ = 1;
  std::mutex turn_;
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  uint64_t generation_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<int> wake_{0};
};

inline Pool& pool() {
  // Never destroyed: its threads end with the process.
  static Pool* instance = new Pool;
  return *instance;
}

}  // namespace takt
