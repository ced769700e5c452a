// SPDX-License-Identifier: Apache-2.0
// Distribution of a job's chunks to threads. A job is one parallel loop, and a chunk is a part of
// it. Each group of up to 8 threads gets a run of neighboring chunks and a counter. Only the
// threads of the group write its counter, until another group runs out of chunks and claims some of
// them. Equal jobs are distributed equally, so the threads of a memory node read again what they
// touched first. This code uses no threads and no clock, so tests can simulate every thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace specops {

// Thread groups of all memory nodes. A node is a set of CPUs that share memory; the groups of a
// node are adjacent.
struct ThreadGroups {
  static constexpr int kThreads = 8;  // most threads per group

  struct Group {
    int node;
    int threads;
  };
  std::vector<Group> groups;
  std::vector<int> first_of_node;  // first group of each node; then the number of groups

  // Assigns num_threads threads (at least 1) to nodes in proportion to their CPUs.
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

  // Returns the group of a thread that runs on `node`. If the node has no group, returns any group.
  int home(int thread, int node) const {
    int first = first_of_node[static_cast<size_t>(node)];
    int count = first_of_node[static_cast<size_t>(node) + 1] - first;
    return count == 0 ? thread % size() : first + thread % count;
  }

  // Returns the group in which a thread of group `home` looks for chunks after `visited` others.
  // The groups of the thread's own node come first.
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

  // Progress of a thread through the groups during one job.
  struct Way {
    int home;
    int visited = 0;
    int64_t held = 0;  // chunks claimed from the current group and not reported as finished
  };

  // Begins a job; all chunks of the previous job must be finished. A thread that claims a chunk
  // sees all writes before this call: the claim acquires what the store to `left` releases.
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

  // Claims a chunk for the calling thread and returns it; returns -1 if none is left. A thread that
  // is still busy with an earlier job may claim a chunk of this job. That is safe, because the
  // thread reads the job only after the claim, and a job does not end before its claimed chunks are
  // finished. Calls `on_finished` when all chunks of a group are finished.
  template <typename OnFinished>
  int64_t claim(Way& way, OnFinished&& on_finished) {
    for (; way.visited < groups_.size(); ++way.visited) {
      Counters& counters = counters_[groups_.turn(way.home, way.visited)];
      // Read before the claim, so that threads of other groups do not write the counter of an
      // exhausted group.
      if (counters.left.load(std::memory_order_relaxed) > 0) {
        int64_t left = counters.left.fetch_sub(1, std::memory_order_acquire);
        if (left > 0) {
          ++way.held;
          return counters.end - left;
        }
      }
      if (way.held == 0) continue;
      // Releases the results of the chunks to the caller, which acquires them in finished().
      // seq_cst orders this before the later check whether the caller sleeps.
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
  // Each group uses two cache lines, so that threads that claim chunks do not wait for threads that
  // finish chunks. They are 128 bytes apart, because CPUs fetch lines in pairs.
  struct alignas(128) Counters {
    std::atomic<int64_t> left{0};  // chunks not yet claimed; below zero: number of failed claims
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
