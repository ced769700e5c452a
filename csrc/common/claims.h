// SPDX-License-Identifier: Apache-2.0
// Distribution of a job's chunks to threads. Each group of a few threads gets a run of neighboring
// chunks and a counter of its own, so that only the group's threads write a counter until one of
// them runs out of chunks. Equal jobs are distributed equally, so that threads of a memory node
// read again what they touched first. It uses no threads and no clock, so that tests can simulate
// every thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace specops {

// A node is a set of CPUs that share memory. Groups of a node are adjacent.
struct ThreadGroups {
  static constexpr int kThreads = 8;  // most threads per group

  struct Group {
    int node;
    int threads;
  };
  std::vector<Group> groups;
  std::vector<int> first_of_node;  // and, last, the number of groups

  // Distributes num_threads (at least 1) to nodes in proportion to their CPUs.
  static ThreadGroups of(int num_threads, const std::vector<int>& cpus_of_node) {
    int64_t cpus = 0, before = 0;
    for (int count : cpus_of_node) cpus += count;
    ThreadGroups out;
    for (int node = 0; node < static_cast<int>(cpus_of_node.size()); ++node) {
      out.first_of_node.push_back(static_cast<int>(out.groups.size()));
      int64_t begin = num_threads * before / cpus;
      before += cpus_of_node[static_cast<size_t>(node)];
      int threads = static_cast<int>(num_threads * before / cpus - begin);
      int groups = (threads + kThreads - 1) / kThreads;
      for (int i = 0; i < groups; ++i) {
        out.groups.push_back({node, threads * (i + 1) / groups - threads * i / groups});
      }
    }
    out.first_of_node.push_back(static_cast<int>(out.groups.size()));
    return out;
  }

  int size() const { return static_cast<int>(groups.size()); }

  // Returns the group of a thread that runs on this node; any group if the node has none.
  int home(int thread, int node) const {
    int first = first_of_node[static_cast<size_t>(node)];
    int count = first_of_node[static_cast<size_t>(node) + 1] - first;
    return count == 0 ? thread % size() : first + thread % count;
  }

  // Returns the group that a thread of group `home` tries after `visited` others; groups of its
  // node come first.
  int turn(int home, int visited) const {
    auto node = static_cast<size_t>(groups[static_cast<size_t>(home)].node);
    int first = first_of_node[node], count = first_of_node[node + 1] - first;
    int place = home - first;
    if (visited < count) return first + (place + visited) % count;
    int others = size() - count;
    return (first + count + (place + visited - count) % others) % size();
  }
};

class Claims {
 public:
  explicit Claims(ThreadGroups groups)
      : groups_(std::move(groups)), counters_(new Counters[static_cast<size_t>(groups_.size())]) {
    for (const auto& group : groups_.groups) num_threads_ += group.threads;
  }

  const ThreadGroups& groups() const { return groups_; }

  // A thread's progress through the groups, for one job.
  struct Way {
    int home;
    int visited = 0;
    int64_t held = 0;  // chunks claimed from the current group
  };

  // Begins a job. All chunks of the previous job must be finished. A thread that claims a chunk
  // sees all earlier writes: a claim acquires what the store of `left` releases.
  void publish(int64_t num_chunks) {
    int64_t before = 0;
    for (int g = 0; g < groups_.size(); ++g) {
      int64_t begin = share(num_chunks, before);
      before += groups_.groups[static_cast<size_t>(g)].threads;
      Counters& counters = counters_[g];
      counters.end = share(num_chunks, before);
      counters.unfinished.store(counters.end - begin, std::memory_order_relaxed);
      counters.left.store(counters.end - begin, std::memory_order_release);
    }
  }

  // Returns a chunk that no other thread gets, or -1 if none is left. A thread that still works on
  // an earlier job may claim a chunk of this one: it reads the job only afterwards, and a job does
  // not end before its claimed chunks are finished. `on_finished` is called when the chunks of a
  // group are finished.
  template <typename OnFinished>
  int64_t claim(Way& way, OnFinished&& on_finished) {
    for (; way.visited < groups_.size(); ++way.visited) {
      Counters& counters = counters_[groups_.turn(way.home, way.visited)];
      // Read first, so that an exhausted group's counter is not written by threads of other groups.
      if (counters.left.load(std::memory_order_relaxed) > 0) {
        int64_t left = counters.left.fetch_sub(1, std::memory_order_acquire);
        if (left > 0) {
          ++way.held;
          return counters.end - left;
        }
      }
      if (way.held == 0) continue;
      // Releases the results to the caller, who acquires them in finished(). seq_cst orders it
      // before the later check whether the caller sleeps.
      int64_t held = way.held;
      way.held = 0;
      if (counters.unfinished.fetch_sub(held, std::memory_order_seq_cst) == held) on_finished();
    }
    return -1;
  }

  bool finished() const {
    for (int g = 0; g < groups_.size(); ++g) {
      if (counters_[g].unfinished.load(std::memory_order_seq_cst) != 0) return false;
    }
    return true;
  }

 private:
  // Two cache lines per group, so that threads that still claim do not wait for threads that
  // finish; 128 bytes apart, because lines are fetched in pairs.
  struct alignas(128) Counters {
    std::atomic<int64_t> left{0};  // chunks to be claimed; below zero: failed claims
    int64_t end = 0;               // end of the group's chunks; read after claiming one
    alignas(64) std::atomic<int64_t> unfinished{0};
  };

  int64_t share(int64_t num_chunks, int64_t threads) const {
    return num_chunks / num_threads_ * threads + num_chunks % num_threads_ * threads / num_threads_;
  }

  ThreadGroups groups_;
  std::unique_ptr<Counters[]> counters_;
  int64_t num_threads_ = 0;
};

}  // namespace specops
