// SPDX-License-Identifier: Apache-2.0
// Who computes which chunk of a job. The chunks are dealt to groups of a few threads, each group a run
// of neighbours and a counter of its own, so that no counter is written by more than a group's threads
// until one of them has nothing left. Equal jobs are dealt equally: what the threads of a memory node
// touched first, they read again. Free of threads and of clocks, so that tests can play every part.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace specops {

// A node is CPUs that share memory. Its groups are neighbours in the order of nodes.
struct ThreadGroups {
  static constexpr int kThreads = 8;  // of a group at most

  struct Group {
    int node;
    int threads;
  };
  std::vector<Group> groups;
  std::vector<int> first_of_node;  // and, last, the number of groups

  // Deals num_threads (at least 1) to nodes in proportion to their CPUs.
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

  // The group of a thread that runs on this node: of a node without groups, any.
  int home(int thread, int node) const {
    int first = first_of_node[static_cast<size_t>(node)];
    int count = first_of_node[static_cast<size_t>(node) + 1] - first;
    return count == 0 ? thread % size() : first + thread % count;
  }

  // The group that a thread of group `home` turns to after `visited` others: those of its node first.
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

  // A thread's way through the groups, for one job.
  struct Way {
    int home;
    int visited = 0;
    int64_t held = 0;  // chunks claimed from the group where it is
  };

  // Begins a job. All chunks of the one before are finished. What was written before, whoever claims a
  // chunk sees: a claim acquires what the store of `left` releases.
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

  // A chunk that nobody else has or will get, or -1: there is none left. A thread that comes from a
  // job of before may claim a chunk of this one: what the job is, it reads only afterwards, and a job
  // with a claimed chunk goes on until that is finished. `on_finished` is called when the chunks of a
  // group are finished.
  template <typename OnFinished>
  int64_t claim(Way& way, OnFinished&& on_finished) {
    for (; way.visited < groups_.size(); ++way.visited) {
      Counters& counters = counters_[groups_.turn(way.home, way.visited)];
      // Read first: a group with nothing left costs its threads no write of strangers.
      if (counters.left.load(std::memory_order_relaxed) > 0) {
        int64_t left = counters.left.fetch_sub(1, std::memory_order_acquire);
        if (left > 0) {
          ++way.held;
          return counters.end - left;
        }
      }
      if (way.held == 0) continue;
      // Releases the results to the caller, who acquires them in finished(); in one order with the
      // look at whether the caller sleeps, which follows.
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
  // Two lines a group, since those who still claim should not wait for those who are done; 128 bytes
  // apart, as lines come in pairs.
  struct alignas(128) Counters {
    std::atomic<int64_t> left{0};  // to be claimed; below zero: claimed in vain
    int64_t end = 0;               // behind the group's last chunk; read by who has claimed one
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
