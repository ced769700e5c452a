// SPDX-License-Identifier: Apache-2.0
// Simulates the threads of large machines, one claim at a time in random order, without threads or
// a clock. Checks the rules of claims.h: no chunk is claimed twice or lost, neighbors belong to one
// group, and near chunks come first.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "common/claims.h"

namespace {

using specops::Claims;
using specops::ThreadGroups;

void require(bool condition, const char* what) {
  if (condition) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}

struct Player {
  int node;
  Claims::Way way;
  std::vector<int64_t> chunks;
  bool is_done = false;
};

struct Game {
  Claims claims;
  std::vector<Player> players;

  // Spreads players over the nodes in proportion to their CPUs.
  Game(int num_threads, const std::vector<int>& cpus_of_node)
      : claims(ThreadGroups::of(num_threads, cpus_of_node)) {
    for (const auto& group : claims.groups().groups) {
      for (int i = 0; i < group.threads; ++i) players.push_back({group.node, {}, {}});
    }
  }

  void begin(int64_t num_chunks) {
    claims.publish(num_chunks);
    for (size_t i = 0; i < players.size(); ++i) {
      Player& player = players[i];
      player.way = {.home = claims.groups().home(static_cast<int>(i), player.node)};
      player.chunks.clear();
      player.is_done = false;
    }
  }

  void turn(Player& player) {
    int64_t chunk = claims.claim(player.way, [] {});
    player.is_done = chunk < 0;
    if (chunk >= 0) player.chunks.push_back(chunk);
  }
};

void groups_are_what_they_are_said_to_be() {
  for (int threads = 1; threads <= 200; ++threads) {
    for (const std::vector<int>& cpus : {std::vector<int>{1}, {32, 32}, {48, 16}, {8, 0, 8, 8}}) {
      ThreadGroups groups = ThreadGroups::of(threads, cpus);
      int total = 0;
      for (const auto& group : groups.groups) {
        require(group.threads >= 1 && group.threads <= ThreadGroups::kThreads, "size of a group");
        total += group.threads;
      }
      require(total == threads, "every thread is in a group");
      for (int home = 0; home < groups.size(); ++home) {
        std::vector<int> visits(static_cast<size_t>(groups.size()), 0);
        bool away = false;
        for (int visited = 0; visited < groups.size(); ++visited) {
          int group = groups.turn(home, visited);
          ++visits[static_cast<size_t>(group)];
          bool near = groups.groups[static_cast<size_t>(group)].node ==
                      groups.groups[static_cast<size_t>(home)].node;
          require(visited > 0 || group == home, "home first");
          require(!(near && away), "groups of the own node before others");
          away = away || !near;
        }
        require(std::all_of(visits.begin(), visits.end(), [](int n) { return n == 1; }),
                "every group is visited once");
      }
    }
  }
}

// Checks that every chunk is claimed exactly once, for threads of any speed and any number of
// chunks.
void every_chunk_once(uint32_t seed) {
  std::mt19937 random(seed);
  int num_threads = 1 + static_cast<int>(random() % 64);
  Game game(num_threads, random() % 2 == 0 ? std::vector<int>{32, 32} : std::vector<int>{1});
  for (int64_t num_chunks : {1, 2, 7, 63, 64, 65, 500, 4099}) {
    game.begin(num_chunks);
    std::vector<int> claimed(static_cast<size_t>(num_chunks), 0);
    std::vector<uint32_t> speed(game.players.size());
    for (uint32_t& s : speed) s = 1 + random() % 50;
    while (!game.claims.finished()) {
      size_t i = random() % game.players.size();
      if (!game.players[i].is_done && random() % 50 < speed[i]) game.turn(game.players[i]);
    }
    for (const Player& player : game.players) {
      require(std::is_sorted(player.chunks.begin(), player.chunks.end()) || num_threads > 1,
              "one thread goes in order");
      for (int64_t chunk : player.chunks) ++claimed[static_cast<size_t>(chunk)];
    }
    require(std::all_of(claimed.begin(), claimed.end(), [](int n) { return n == 1; }),
            "every chunk is claimed exactly once");
    for (Player& player : game.players) game.turn(player);
    for (const Player& player : game.players) require(player.is_done, "nothing is left");
  }
}

// Checks that a job ends exactly when the last claimed chunk is finished.
void unfinished_while_a_chunk_is_held() {
  Game game(64, {32, 32});
  game.begin(64);
  Player &slow = game.players.front(), &fast = game.players.back();
  game.turn(slow);
  while (!fast.is_done) game.turn(fast);
  require(fast.chunks.size() == 63, "one thread can do all the others' work");
  require(!game.claims.finished(), "not finished while a chunk is held");
  game.turn(slow);
  require(game.claims.finished(), "finished when the holder asks for more");
}

// Checks that a thread that sleeps through a job can claim only chunks of the next job.
void late_threads() {
  Game game(64, {32, 32});
  game.begin(10);
  Player late = game.players[5];
  for (Player& player : game.players) {
    while (&player != &game.players[5] && !player.is_done) game.turn(player);
  }
  require(game.claims.finished(), "no wait for threads that have not begun");
  game.begin(20);
  std::vector<int> claimed(20, 0);
  for (int64_t chunk; (chunk = game.claims.claim(late.way, [] {})) >= 0;) {
    require(chunk < 20, "a chunk of the current job");
    ++claimed[static_cast<size_t>(chunk)];
  }
  require(std::all_of(claimed.begin(), claimed.end(), [](int n) { return n == 1; }), "all of it");
  require(game.claims.finished(), "and finishes them");
}

// Checks that, at equal speed, the threads of a node process the same chunks in every job, and that
// only the threads of a group write its counter.
void locality() {
  Game game(64, {32, 32});
  const int64_t num_chunks = 64 * 8;
  std::vector<int> node_of(static_cast<size_t>(num_chunks), -1);
  for (int job = 0; job < 3; ++job) {
    game.begin(num_chunks);
    for (int round = 0; round < 8; ++round) {
      for (Player& player : game.players) game.turn(player);
    }
    for (const Player& player : game.players) {
      require(player.chunks.size() == 8, "equal numbers of chunks");
      require(player.way.visited == 0, "no thread writes another group's counter");
      for (int64_t chunk : player.chunks) {
        int& node = node_of[static_cast<size_t>(chunk)];
        require(node == -1 || node == player.node, "the same node in every job");
        node = player.node;
      }
    }
    for (Player& player : game.players) game.turn(player);
    require(game.claims.finished(), "finished");
  }
  require(std::is_sorted(node_of.begin(), node_of.end()), "neighbors on one node");
  // If the threads of one node are stopped, the others process all chunks, their own half first.
  game.begin(num_chunks);
  for (int64_t turn = 0; turn <= num_chunks; ++turn) {
    Player& player = game.players[static_cast<size_t>(32 + turn % 32)];
    game.turn(player);
    if (player.is_done) continue;
    require((player.chunks.back() >= num_chunks / 2) == (turn < num_chunks / 2), "own half first");
  }
}

}  // namespace

int main() {
  groups_are_what_they_are_said_to_be();
  for (uint32_t seed = 0; seed < 300; ++seed) every_chunk_once(seed);
  unfinished_while_a_chunk_is_held();
  late_threads();
  locality();
  return 0;
}
