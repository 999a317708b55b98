// Work shared among threads. Each item is computed by one thread alone, so their number and the
// order of items change no bits.
//
// The threads are our own, not OpenMP's, whose regions end when every thread of the team has come:
// beside a busy process one of them waits for a core while the other spins, thousands of times in
// a decoding step, which took 15 to 40 times as long. Here whoever is on a core takes the items,
// first those of its own share, then what is left of the others'; the caller waits for items
// that somebody has begun, and for nobody else. Threads spin for some microseconds, then sleep.
//
// Left out: to share work while the threads are busy with another caller's. It then does its items
// alone, since the cores are taken anyway.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>

// Below so many elements one thread is done before a second has started.
constexpr int64_t WORTH_A_THREAD = 1 << 15;
inline int64_t threads_for(int64_t num_elements, int64_t threads) {
  return num_elements >= WORTH_A_THREAD ? threads : 1;
}

constexpr int SPINS = 2000;  // pauses, some 20 to 60 microseconds, before a thread sleeps
constexpr int MOST_THREADS = 64;

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class ThreadPool {
 public:
  using Call = void (*)(void* work, int64_t item);

  // The first item of a share.
  static int64_t first_of(int64_t share, int64_t num_items, int64_t num_shares) {
    return num_items * share / num_shares;
  }

  // Never destroyed: its threads may sleep in it when the process ends. A forked child, which has
  // none of the threads, makes one of its own.
  static ThreadPool& instance() {
    static std::once_flag once;
    std::call_once(once, [] {
      pthread_atfork(nullptr, nullptr, [] { current() = new ThreadPool; });
      current() = new ThreadPool;
    });
    return *current();
  }

  // Calls call(work, i) for every i below num_items and returns when all are done.
  void run(int64_t num_items, int64_t num_threads, Call call, void* work) {
    const int64_t num_shares = std::min<int64_t>({num_items, num_threads, MOST_THREADS});
    if (num_shares <= 1 || is_taken_.exchange(true, std::memory_order_acquire)) {
      for (int64_t i = 0; i < num_items; i++) call(work, i);
      return;
    }
    while (num_workers_ < num_shares - 1) start_worker();
    const uint32_t job = job_.load(std::memory_order_relaxed) + 1;
    call_.store(call, std::memory_order_relaxed), work_.store(work, std::memory_order_relaxed);
    num_shares_.store(num_shares, std::memory_order_relaxed);
    num_left_.store(num_items, std::memory_order_relaxed);
    // large enough that the counting costs little, small enough that much is left to help with
    const int64_t chunk = std::max<int64_t>(1, num_items / (8 * num_shares));
    chunk_.store(chunk, std::memory_order_relaxed);
    for (int64_t s = 0; s < num_shares; s++) {
      // emptied for this job first: whoever came late for the last one must not see a new end beside
      // an item of the old job
      shares_[s].next.store(tagged(job, ITEM_MASK), std::memory_order_relaxed);
      shares_[s].end.store(first_of(s + 1, num_items, num_shares), std::memory_order_release);
      shares_[s].next.store(tagged(job, first_of(s, num_items, num_shares)), std::memory_order_release);
    }
    job_.store(job);
    if (num_asleep_.load() > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    take_items(job, 0);
    wait_for_the_rest();
    is_taken_.store(false, std::memory_order_release);
  }

 private:
  struct alignas(64) Share {
    std::atomic<uint64_t> next{0};  // the job's number, and the item to take next
    std::atomic<int64_t> end{0};
  };

  static constexpr int ITEM_BITS = 40;
  static constexpr uint64_t ITEM_MASK = (uint64_t(1) << ITEM_BITS) - 1;
  // A job's number in the upper bits tells a thread that comes late that it came for another job.
  static uint64_t tagged(uint32_t job, int64_t item) {
    return uint64_t(job) << ITEM_BITS | uint64_t(item);
  }
  static uint64_t tag_of(uint32_t job) { return tagged(job, 0) >> ITEM_BITS; }
  static ThreadPool*& current() {
    static ThreadPool* pool = nullptr;
    return pool;
  }

  // An item is taken only while its job is unfinished, since it is itself not done: so what was
  // read before, call and work, was this job's.
  void take_items(uint32_t job, int64_t own) {
    const Call call = call_.load(std::memory_order_relaxed);
    void* work = work_.load(std::memory_order_relaxed);
    const int64_t num_shares = num_shares_.load(std::memory_order_relaxed);
    const int64_t chunk = chunk_.load(std::memory_order_relaxed);
    for (int64_t i = 0; i < num_shares; i++) {
      Share& share = shares_[(own + i) % num_shares];
      uint64_t next = share.next.load(std::memory_order_acquire);
      while (next >> ITEM_BITS == tag_of(job)) {
        const int64_t item = int64_t(next & ITEM_MASK);
        const int64_t n = std::min(chunk, share.end.load(std::memory_order_acquire) - item);
        if (n <= 0) break;
        if (!share.next.compare_exchange_weak(next, next + uint64_t(n))) continue;
        for (int64_t j = item; j < item + n; j++) call(work, j);
        if (num_left_.fetch_sub(n) == n && is_waiting_.load()) {
          std::lock_guard<std::mutex> lock(mutex_);
          done_.notify_one();
        }
        next = share.next.load(std::memory_order_acquire);
      }
    }
  }

  void wait_for_the_rest() {
    for (int i = 0; i < SPINS; i++) {
      if (num_left_.load(std::memory_order_acquire) == 0) return;
      pause_briefly();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    is_waiting_.store(true);
    done_.wait(lock, [&] { return num_left_.load() == 0; });
    is_waiting_.store(false);
  }

  void start_worker() {
    sigset_t all, before;  // signals are for the program's own threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int64_t own = ++num_workers_;
    std::thread([this, own, seen = job_.load()] { work_for_ever(own, seen); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void work_for_ever(int64_t own, uint32_t seen) {
    for (;;) {
      seen = wait_for_job(seen);
      if (own < num_shares_.load(std::memory_order_relaxed)) take_items(seen, own);
    }
  }

  uint32_t wait_for_job(uint32_t seen) {
    for (int i = 0; i < SPINS; i++) {
      const uint32_t job = job_.load(std::memory_order_acquire);
      if (job != seen) return job;
      pause_briefly();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    num_asleep_.fetch_add(1);
    wake_.wait(lock, [&] { return job_.load() != seen; });
    num_asleep_.fetch_sub(1);
    return job_.load();
  }

  std::atomic<bool> is_taken_{false};  // by a caller
  int64_t num_workers_ = 0;            // the caller's
  std::atomic<uint32_t> job_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<void*> work_{nullptr};
  std::atomic<int64_t> num_shares_{0}, chunk_{1}, num_left_{0};
  Share shares_[MOST_THREADS];
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<int> num_asleep_{0};
  std::atomic<bool> is_waiting_{false};
};

template <class F>
inline void parallel_for(int64_t num_items, int64_t num_threads, F f) {
  if (num_threads <= 1 || num_items <= 1) {
    for (int64_t i = 0; i < num_items; i++) f(i);
    return;
  }
  ThreadPool::instance().run(
      num_items, num_threads, [](void* work, int64_t item) { (*static_cast<F*>(work))(item); }, &f);
}
