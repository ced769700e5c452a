// SPDX-License-Identifier: Apache-2.0
// Implementation of SuffixCache. Each request has a slot. A linked list through the slots orders
// the cached requests of all scopes by start. One mutex protects everything except the trees on
// which the builder thread is working.
#include "suffix_tree/suffix_cache.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "common/parallel.h"
#include "suffix_tree/suffix_file.h"

namespace specops {
namespace {

constexpr int32_t kNoSlot = -1;
constexpr int32_t kNoSequence = -1;
// Number of removed tokens to reclaim per appended token. It is above one, so that the backlog
// shrinks.
constexpr int64_t kReclaimPerToken = 2;
// Shared trees may use twice the byte budget plus this many bytes, including memory that is free
// for reuse.
constexpr int64_t kSpareBytes = int64_t{1} << 20;
// The trees of ended requests are kept for later requests, up to this number and size.
constexpr size_t kMaxIdleTrees = 256;
constexpr int64_t kMaxIdleTreeBytes = int64_t{1} << 18;
// The builder thread checks after every this many tokens whether its request has been stopped.
constexpr int64_t kBuildTokens = 4096;
// Number of rows of a batch that a thread processes at once.
constexpr int64_t kRowsAtOnce = 4;

// The last tokens of a text, at most `depth`, in contiguous memory.
class Tail {
 public:
  void clear() { tokens_.clear(); }

  void append(const int32_t* token_ids, int64_t size, int64_t depth) {
    int64_t kept = static_cast<int64_t>(tokens_.size());
    if (size >= depth) {
      tokens_.assign(token_ids + size - depth, token_ids + size);
      return;
    }
    if (kept + size > 2 * depth) {
      int64_t last = depth - size;
      std::memmove(tokens_.data(), tokens_.data() + kept - last, last * sizeof(int32_t));
      tokens_.resize(last);
    }
    tokens_.insert(tokens_.end(), token_ids, token_ids + size);
  }

  int64_t size(int64_t depth) const {
    return std::min(static_cast<int64_t>(tokens_.size()), depth);
  }
  const int32_t* data(int64_t depth) const {
    return tokens_.data() + tokens_.size() - static_cast<size_t>(size(depth));
  }

 private:
  std::vector<int32_t> tokens_;  // at most 2 * depth
};

// The tree of one request's text, with a single sequence.
struct OwnTree {
  explicit OwnTree(int32_t max_depth) : tree(max_depth) {}
  SuffixTree tree;
  int32_t sequence = kNoSequence;
};

// A prompt that the builder thread adds to a tree. `queued`, `done` and `cancelled` belong to the
// cache; the other members belong to the builder until it is done.
struct Build {
  std::unique_ptr<OwnTree> own;
  std::vector<int32_t> prompt;
  std::vector<int32_t> queued;  // tokens appended since the start
  int32_t slot = kNoSlot;
  std::atomic<bool> cancelled{false};
};

// The tree of the responses of one scope, or the common tree, from which every request drafts.
struct SharedTree {
  SharedTree(std::string name, int32_t max_depth, bool common)
      : name(std::move(name)), common(common), tree(std::make_unique<SuffixTree>(max_depth)) {}
  const std::string name;
  const bool common;
  std::unique_ptr<SuffixTree> tree;
  int64_t users = 0;  // slots that refer to it
  // Contribution of this tree to the totals of the cache, as of its last change.
  int64_t tokens = 0, pending = 0, used_bytes = 0, taken_bytes = 0;
  bool is_reclaimed = false;  // listed in to_reclaim
};

struct Request {
  int64_t number = -1;  // -1: the slot is free
  int64_t generation = 0;
  int64_t step = 0;  // last step that included it
  bool running = false;
  SharedTree* scope = nullptr;                 // nullptr: there are no shared trees
  int32_t shared = kNoSequence;                // the request's sequence in that tree
  int32_t older = kNoSlot, younger = kNoSlot;  // neighbors among requests in shared trees
  int32_t earlier = kNoSlot, later = kNoSlot;  // neighbors among running requests
  std::unique_ptr<OwnTree> own;  // tree of a running request; nullptr while it is built
  std::shared_ptr<Build> build;
  Tail tail;  // of prompt and response; only for a running request
};

// A doubly linked list through the slots.
template <int32_t Request::* kBefore, int32_t Request::* kAfter>
struct Chain {
  int32_t first = kNoSlot, last = kNoSlot;
  int64_t size = 0;

  void push(std::vector<Request>& slots, int32_t slot) {
    slots[slot].*kBefore = last;
    slots[slot].*kAfter = kNoSlot;
    (last == kNoSlot ? first : slots[last].*kAfter) = slot;
    last = slot;
    ++size;
  }

  void remove(std::vector<Request>& slots, int32_t slot) {
    int32_t before = slots[slot].*kBefore;
    int32_t after = slots[slot].*kAfter;
    (before == kNoSlot ? first : slots[before].*kAfter) = after;
    (after == kNoSlot ? last : slots[after].*kBefore) = before;
    --size;
  }

  std::vector<int64_t> numbers(const std::vector<Request>& slots) const {
    std::vector<int64_t> out;
    for (int32_t slot = first; slot != kNoSlot; slot = slots[slot].*kAfter) {
      out.push_back(slots[slot].number);
    }
    return out;
  }
};

// Buffers for the draft of a shared tree, which replaces the current draft only if it is better.
struct Scratch {
  std::vector<int32_t> token_ids, parents, context;
  std::vector<float> probs;

  SuffixDraft draft(int32_t room, const SuffixDraft& like) {
    if (static_cast<size_t>(room) > token_ids.size()) {
      token_ids.resize(room);
      parents.resize(room);
      probs.resize(room);
    }
    return {.token_ids = token_ids.data(),
            .parents = like.parents ? parents.data() : nullptr,
            .probs = like.probs ? probs.data() : nullptr};
  }
};

Scratch& scratch() {
  thread_local Scratch instance;
  return instance;
}

void copy_draft(const SuffixDraft& from, SuffixDraft& to) {
  size_t size = from.size;
  std::memcpy(to.token_ids, from.token_ids, size * sizeof(int32_t));
  if (to.parents) std::memcpy(to.parents, from.parents, size * sizeof(int32_t));
  if (to.probs) std::memcpy(to.probs, from.probs, size * sizeof(float));
  to.size = from.size;
  to.score = from.score;
  to.match_len = from.match_len;
}

bool has_shared_trees(const SuffixCacheOptions& options) {
  return options.max_cached_requests != 0 && options.max_cached_tokens != 0 &&
         options.max_cached_bytes != 0;
}

// File layout: the label, this header, the places of the requests, and the name and contents of
// each tree. Format 1 does not have the number of trees, stores a handle for each place, and has
// one tree without a name.
struct FileHead {
  int64_t max_depth;
  int64_t num_requests;
  int64_t num_trees;
};
constexpr size_t kFirstHeadBytes = 2 * sizeof(int64_t);

struct FilePlace {
  int32_t tree;
  int32_t handle;
};

// Prefix of the name of a scope's tree in a file.
constexpr char kScoped = 's';
constexpr char kCommon = 'c';

std::string next_text(FileReader& file) {
  std::string text(file.section_bytes(), '\0');
  file.section(text.data(), text.size());
  return text;
}

}  // namespace

struct SuffixCache::State {
  explicit State(const SuffixCacheOptions& given)
      : options(given), depth(given.max_tree_depth), has_shared(has_shared_trees(given)) {
    if (has_shared) tree_of("");
  }

  ~State() {
    if (!builder.joinable()) return;
    if (!has_builder()) {  // a forked child has the object but not the thread
      builder.detach();
      return;
    }
    {
      std::lock_guard<std::mutex> guard(mutex);
      stopping = true;
      for (const std::shared_ptr<Build>& build : builds) build->cancelled = true;
      if (current) current->cancelled = true;
    }
    wake.notify_all();
    builder.join();
  }

  // ---- slots ----

  Request* find(int64_t number) {
    int64_t slot = SuffixCache::slot(number);
    if (number < 0 || slot >= static_cast<int64_t>(slots.size())) return nullptr;
    Request& request = slots[slot];
    return request.number == number ? &request : nullptr;
  }

  Request& running_request(int64_t number) {
    Request* request = find(number);
    if (request == nullptr || !request->running) {
      throw std::invalid_argument("request must be the number of a running one, got " +
                                  std::to_string(number));
    }
    return *request;
  }

  int32_t slot_of(const Request& request) const {
    return static_cast<int32_t>(SuffixCache::slot(request.number));
  }

  Request& take_slot() {
    if (free_slots.empty()) {
      free_slots.push_back(static_cast<int32_t>(slots.size()));
      slots.emplace_back();
    }
    int32_t slot = free_slots.back();
    free_slots.pop_back();
    Request& request = slots[slot];
    request.number = (request.generation++ << 32) | slot;
    return request;
  }

  void free_if_unused(Request& request) {
    if (request.running || request.shared != kNoSequence) return;
    free_slots.push_back(slot_of(request));
    request.number = -1;
    SharedTree* scope = std::exchange(request.scope, nullptr);
    if (scope != nullptr) leave(*scope);
  }

  // ---- shared trees ----

  // Returns the tree of a scope. Creates it at the first use.
  SharedTree& tree_of(const std::string& scope) {
    std::unique_ptr<SharedTree>& found = trees[scope];
    if (found == nullptr) {
      found = std::make_unique<SharedTree>(scope, options.max_tree_depth, false);
      account(*found);
    }
    return *found;
  }

  SharedTree& common_tree() {
    if (common == nullptr) {
      common = std::make_unique<SharedTree>("", options.max_tree_depth, true);
      account(*common);
    }
    return *common;
  }

  void join(Request& request, SharedTree& tree) {
    request.scope = &tree;
    ++tree.users;
  }

  // Removes one user of a tree. When the last request of a named scope leaves, its tree is deleted
  // and its memory returns to the system.
  void leave(SharedTree& tree) {
    if (--tree.users > 0 || tree.common || tree.name.empty()) return;
    num_tokens -= tree.tokens;
    num_pending -= tree.pending;
    used_bytes -= tree.used_bytes;
    taken_bytes -= tree.taken_bytes;
    forget_reclaiming(tree);
    trees.erase(trees.find(tree.name));
  }

  void forget_reclaiming(SharedTree& tree) {
    if (!std::exchange(tree.is_reclaimed, false)) return;
    to_reclaim.erase(std::find(to_reclaim.begin(), to_reclaim.end(), &tree));
  }

  // Updates the totals of the cache after a tree has changed.
  void account(SharedTree& shared) {
    const SuffixTree& tree = *shared.tree;
    num_tokens += tree.num_tokens() - shared.tokens;
    num_pending += tree.num_pending_tokens() - shared.pending;
    used_bytes += tree.num_used_bytes() - shared.used_bytes;
    taken_bytes += tree.num_bytes() - shared.taken_bytes;
    shared.tokens = tree.num_tokens();
    shared.pending = tree.num_pending_tokens();
    shared.used_bytes = tree.num_used_bytes();
    shared.taken_bytes = tree.num_bytes();
    if (shared.pending > 0 && !shared.is_reclaimed) {
      shared.is_reclaimed = true;
      to_reclaim.push_back(&shared);
    }
  }

  int64_t reclaim(int64_t most) {
    int64_t given = 0;
    while (given < most && !to_reclaim.empty()) {
      SharedTree& shared = *to_reclaim.back();
      given += shared.tree->reclaim(most - given);
      account(shared);
      if (shared.pending > 0) break;
      shared.is_reclaimed = false;
      to_reclaim.pop_back();
    }
    return given;
  }

  void evict(Request& request) {
    request.scope->tree->remove(request.shared);
    account(*request.scope);
    request.shared = kNoSequence;
    cached.remove(slots, slot_of(request));
    free_if_unused(request);
  }

  bool over_budget() const {
    if (options.max_cached_tokens >= 0 && num_tokens > options.max_cached_tokens) return true;
    if (options.max_cached_bytes < 0) return false;
    // Removed tokens still use their share of bytes until they are reclaimed.
    auto used = static_cast<double>(used_bytes);
    auto tokens = static_cast<double>(num_tokens);
    double all = tokens + static_cast<double>(num_pending);
    return all > 0 && used * (tokens / all) > static_cast<double>(options.max_cached_bytes);
  }

  // Enforces the budgets after `appended` tokens were added.
  void keep_within_budgets(int64_t appended) {
    while (cached.first != kNoSlot && over_budget()) evict(slots[cached.first]);
    if (num_pending > 0) reclaim(kReclaimPerToken * appended);
    if (trees.size() > 1 && options.max_cached_bytes >= 0 &&
        (taken_bytes - kSpareBytes) / 2 > options.max_cached_bytes) {
      drop_emptiest();
    }
  }

  // Evicts the responses of the scope whose tree has the most memory that is free for reuse; the
  // tree then releases all of its memory. Called if the trees have too much such memory, because
  // one tree cannot use the free memory of another.
  void drop_emptiest() {
    SharedTree* emptiest = nullptr;
    int64_t most = 0;
    for (const auto& [name, tree] : trees) {
      if (tree->taken_bytes - tree->used_bytes <= most) continue;
      most = tree->taken_bytes - tree->used_bytes;
      emptiest = tree.get();
    }
    if (emptiest == nullptr) return;
    ++emptiest->users;
    for (int32_t slot = cached.first; slot != kNoSlot;) {
      int32_t next = slots[slot].younger;
      if (slots[slot].scope == emptiest) evict(slots[slot]);
      slot = next;
    }
    emptiest->tree = std::make_unique<SuffixTree>(options.max_tree_depth);
    account(*emptiest);
    forget_reclaiming(*emptiest);
    leave(*emptiest);
  }

  void begin_shared(Request& request, SharedTree& tree) {
    join(request, tree);
    while (options.max_cached_requests >= 0 && cached.size >= options.max_cached_requests) {
      evict(slots[cached.first]);
    }
    request.shared = tree.tree->start();
    cached.push(slots, slot_of(request));
  }

  void append_shared(Request& request, const int32_t* token_ids, int64_t size) {
    request.scope->tree->append(request.shared, token_ids, size);
    account(*request.scope);
  }

  // ---- own trees ----

  std::unique_ptr<OwnTree> take_tree() {
    std::unique_ptr<OwnTree> own;
    if (idle_trees.empty()) {
      own = std::make_unique<OwnTree>(options.max_tree_depth);
    } else {
      own = std::move(idle_trees.back());
      idle_trees.pop_back();
    }
    own->sequence = own->tree.start();
    return own;
  }

  void retire(std::unique_ptr<OwnTree> own) {
    if (own->tree.num_bytes() <= kMaxIdleTreeBytes && idle_trees.size() < kMaxIdleTrees) {
      own->tree.clear();
      idle_trees.push_back(std::move(own));
    } else if (has_builder()) {
      retired.push_back(std::move(own));  // freed later, because freeing a large tree takes a while
      wake.notify_one();
    }
  }

  void append_own(Request& request, const int32_t* token_ids, int64_t size) {
    if (request.own) {
      request.own->tree.append(request.own->sequence, token_ids, size);
    } else {
      request.build->queued.insert(request.build->queued.end(), token_ids, token_ids + size);
    }
    request.tail.append(token_ids, size, depth);
  }

  // ---- the builder ----

  bool has_builder() const { return builder.joinable() && builder_pid == ::getpid(); }

  void build_in_background(Request& request, const int32_t* prompt, int64_t size) {
    auto build = std::make_shared<Build>();
    build->prompt.assign(prompt, prompt + size);
    build->slot = slot_of(request);
    request.build = build;
    builds.push_back(std::move(build));
    if (!has_builder()) {
      if (builder.joinable()) builder.detach();
      builder_pid = ::getpid();
      builder = std::thread([this] { run_builder(); });
    }
    wake.notify_one();
  }

  void run_builder() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      wake.wait(lock, [&] { return stopping || !builds.empty() || !retired.empty(); });
      if (stopping) return;
      if (builds.empty()) {
        std::vector<std::unique_ptr<OwnTree>> old = std::move(retired);
        retired.clear();
        lock.unlock();
        old.clear();
        lock.lock();
        continue;
      }
      current = std::move(builds.front());
      builds.pop_front();
      build_current(lock);
      current.reset();
      built.notify_all();
    }
  }

  void build_current(std::unique_lock<std::mutex>& lock) {
    Build& build = *current;
    if (build.cancelled) return;
    build.own = take_tree();
    std::vector<int32_t> tokens = std::move(build.prompt);
    while (!tokens.empty() && !build.cancelled) {
      lock.unlock();
      auto size = static_cast<int64_t>(tokens.size());
      for (int64_t at = 0; at < size && !build.cancelled; at += kBuildTokens) {
        build.own->tree.append(
            build.own->sequence, tokens.data() + at, std::min(kBuildTokens, size - at));
      }
      lock.lock();
      tokens.clear();
      std::swap(tokens, build.queued);
    }
    if (build.cancelled) {
      retire(std::move(build.own));
      return;
    }
    Request& request = slots[build.slot];
    request.own = std::move(build.own);
    request.build.reset();
  }

  void wait_for(std::unique_lock<std::mutex>& lock, int64_t number) {
    built.wait(lock, [&] {
      Request* request = find(number);
      return request == nullptr || request->build == nullptr;
    });
  }

  // ---- drafts ----

  void draft_own(const Request& request,
                 int32_t sequence,
                 const int32_t* context,
                 int64_t size,
                 const DraftOptions& draft_options,
                 SuffixDraft& draft) const {
    draft.size = 0;
    draft.score = 0.0f;
    draft.match_len = 0;
    if (request.own) request.own->tree.speculate(sequence, context, size, draft_options, draft);
  }

  // Replaces the draft if the shared tree of the request's scope, or the common tree, has a better
  // one.
  void draft_shared(const Request& request,
                    int32_t sequence,
                    const int32_t* context,
                    int64_t size,
                    const DraftOptions& draft_options,
                    SuffixDraft& draft) const {
    if (!has_shared) return;
    draft_better(*request.scope->tree, sequence, context, size, draft_options, draft);
    if (common) draft_better(*common->tree, kNoSequence, context, size, draft_options, draft);
  }

  static void draft_better(const SuffixTree& tree,
                           int32_t sequence,
                           const int32_t* context,
                           int64_t size,
                           DraftOptions draft_options,
                           SuffixDraft& draft) {
    draft_options.above_score = draft.score;
    SuffixDraft better = scratch().draft(draft_options.max_draft_tokens, draft);
    tree.speculate(sequence, context, size, draft_options, better);
    if (better.size > 0) copy_draft(better, draft);
  }

  // ---- one step of a batch ----

  struct Row {
    Request* request = nullptr;
    int32_t given = 0;
    int32_t room = 0;
    SuffixDraft draft;
  };

  void find_rows(const SuffixStepParams& params) {
    ++steps;
    rows.assign(params.batch, Row());
    for (int64_t b = 0; b < params.batch; ++b) {
      if (params.requests[b] == -1) continue;
      Request* request = find(params.requests[b]);
      if (request == nullptr || !request->running || request->step == steps) {
        throw std::invalid_argument(
            "requests[" + std::to_string(b) + "] must be -1 or the number of a running request" +
            (request != nullptr && request->running ? " that no other row has" : "") + ", got " +
            std::to_string(params.requests[b]));
      }
      request->step = steps;
      rows[b].request = request;
    }
  }

  void append_rows(const SuffixStepParams& params) {
    if (!has_shared) return;
    // Most of the shared trees' data has left the CPU caches since the last step. (Own trees are
    // small.)
    for (int32_t pass = 0; pass < 3; ++pass) {
      for (int64_t b = 0; b < params.batch; ++b) {
        const Request* request = rows[b].request;
        if (request == nullptr || request->shared == kNoSequence) continue;
        if (params.num_new_tokens[b] == 0) continue;
        int32_t token = params.new_token_ids[b * params.new_stride];
        request->scope->tree->prefetch(request->shared, token, pass);
      }
    }
    int64_t appended = 0;
    for (int64_t b = 0; b < params.batch; ++b) {
      Request* request = rows[b].request;
      if (request == nullptr || request->shared == kNoSequence) continue;
      int32_t size = params.num_new_tokens[b];
      append_shared(*request, params.new_token_ids + b * params.new_stride, size);
      appended += size;
    }
    keep_within_budgets(appended);
  }

  // Returns the text that the match of a row must end with: the request's text, or the drafts
  // already in the row.
  const int32_t* row_context(const SuffixStepParams& params, int64_t b, int64_t& size) const {
    const Row& row = rows[b];
    size = row.request->tail.size(depth);
    const int32_t* tail = row.request->tail.data(depth);
    if (row.given == 0) return tail;
    std::vector<int32_t>& context = scratch().context;
    context.assign(tail, tail + size);
    const int32_t* given = params.draft_token_ids + b * params.draft_stride;
    context.insert(context.end(), given, given + row.given);
    size = std::min(size + row.given, depth);
    return context.data() + context.size() - size;
  }

  void draft_row_own(const SuffixStepParams& params, int64_t b) {
    Row& row = rows[b];
    row.given = params.num_given_drafts ? params.num_given_drafts[b] : 0;
    if (row.request == nullptr) return;
    append_own(
        *row.request, params.new_token_ids + b * params.new_stride, params.num_new_tokens[b]);
    row.room = static_cast<int32_t>(
        std::min<int64_t>(params.max_draft_tokens[b], params.capacity - row.given));
    if (row.room == 0) return;
    row.draft.token_ids = params.draft_token_ids + b * params.draft_stride + row.given;
    if (params.parents) row.draft.parents = params.parents + b * params.parents_stride + row.given;
    if (params.probs) row.draft.probs = params.probs + b * params.probs_stride + row.given;
    DraftOptions draft_options = params.options;
    draft_options.max_draft_tokens = row.room;
    int64_t size = 0;
    const int32_t* context = row_context(params, b, size);
    int32_t sequence =
        row.given == 0 && row.request->own ? row.request->own->sequence : kNoSequence;
    draft_own(*row.request, sequence, context, size, draft_options, row.draft);
  }

  void draft_row_shared(const SuffixStepParams& params, int64_t b) {
    Row& row = rows[b];
    if (row.room > 0) {
      DraftOptions draft_options = params.options;
      draft_options.max_draft_tokens = row.room;
      int64_t size = 0;
      const int32_t* context = row_context(params, b, size);
      int32_t sequence = row.given == 0 ? row.request->shared : kNoSequence;
      draft_shared(*row.request, sequence, context, size, draft_options, row.draft);
    }
    const SuffixDraft& draft = row.draft;
    int64_t end = row.given + draft.size;
    std::fill(params.draft_token_ids + b * params.draft_stride + end,
              params.draft_token_ids + b * params.draft_stride + params.capacity,
              -1);
    if (params.parents) {
      int32_t* parents = params.parents + b * params.parents_stride;
      for (int64_t i = row.given; i < end; ++i) parents[i] += row.given;
      std::fill(parents + end, parents + params.capacity, -2);
    }
    if (params.probs) {
      float* probs = params.probs + b * params.probs_stride;
      std::fill(probs + end, probs + params.capacity, 0.0f);
    }
    params.num_draft_tokens[b] = draft.size;
    if (params.scores) params.scores[b] = draft.score;
    if (params.match_lens) params.match_lens[b] = draft.match_len;
  }

  void step(const SuffixStepParams& params) {
    find_rows(params);
    // One work item writes the shared trees. The other items write own trees, each of which belongs
    // to one row.
    int64_t pieces = (params.batch + kRowsAtOnce - 1) / kRowsAtOnce;
    parallel_for(pieces + 1, 1, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) {
        if (piece == 0) {
          append_rows(params);
          continue;
        }
        int64_t last = std::min(piece * kRowsAtOnce, params.batch);
        for (int64_t b = (piece - 1) * kRowsAtOnce; b < last; ++b) draft_row_own(params, b);
      }
    });
    parallel_for(params.batch, kRowsAtOnce, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) draft_row_shared(params, b);
    });
  }

  template <typename Function>
  void for_each_tree(Function&& function) const {
    for (const auto& [name, tree] : trees) function(*tree);
    if (common) function(*common);
  }

  // ---- checks ----

  std::string check() const {
    std::map<const SharedTree*, std::pair<int64_t, int64_t>> found;  // requests, tokens
    int64_t count = 0;
    for (int32_t slot = cached.first; slot != kNoSlot; slot = slots[slot].younger) {
      const Request& request = slots[slot];
      if (request.shared == kNoSequence) return "a cached request has no sequence";
      auto& [requests, tokens] = found[request.scope];
      tokens += request.scope->tree->length(request.shared);
      ++requests;
      ++count;
    }
    if (count != cached.size) return "the list of cached requests has another length";
    int64_t all_tokens = 0;
    int64_t all_pending = 0;
    std::string wrong;
    for_each_tree([&](const SharedTree& shared) {
      const SuffixTree& tree = *shared.tree;
      auto [requests, tokens] = found[&shared];
      if (!wrong.empty()) return;
      wrong = tree.check_integrity();
      if (!wrong.empty()) {
        wrong = "the shared tree: " + wrong;
      } else if (requests != tree.num_sequences()) {
        wrong = "the shared tree and the list of requests differ in number";
      } else if (tokens != tree.num_tokens()) {
        wrong = "the shared tree's tokens are not the requests'";
      } else if (shared.users == 0 && !shared.common && !shared.name.empty()) {
        wrong = "a scope without requests has a tree";
      }
      all_tokens += tokens;
      all_pending += tree.num_pending_tokens();
    });
    if (!wrong.empty()) return wrong;
    if (all_tokens != num_tokens || all_pending != num_pending) return "the totals are wrong";
    int64_t num_running = 0;
    int64_t num_cached = 0;
    int64_t num_free = 0;
    for (const Request& request : slots) {
      num_running += request.running;
      num_cached += request.shared != kNoSequence;
      num_free += request.number < 0;
      if (request.running == (request.number < 0 || !(request.own || request.build))) {
        return "a request has no tree of its own, or one too many";
      }
      if (request.running && request.own) {
        std::string wrong = request.own->tree.check_integrity();
        if (!wrong.empty()) return "a request's own tree: " + wrong;
      }
    }
    if (num_running != running.size || num_cached != cached.size ||
        num_free != static_cast<int64_t>(free_slots.size())) {
      return "the lists of requests do not fit the requests";
    }
    return "";
  }

  const SuffixCacheOptions options;
  const int64_t depth;
  const bool has_shared;  // whether there are trees with responses of many requests
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<SharedTree>> trees;  // by scope; "" always has one
  std::unique_ptr<SharedTree> common;                        // nullptr until a response is added
  std::vector<SharedTree*> to_reclaim;                       // trees with tokens to reclaim
  // Totals over all shared trees.
  int64_t num_tokens = 0, num_pending = 0, used_bytes = 0, taken_bytes = 0;
  std::vector<Request> slots;
  std::vector<int32_t> free_slots;
  Chain<&Request::older, &Request::younger> cached;
  Chain<&Request::earlier, &Request::later> running;
  std::vector<std::unique_ptr<OwnTree>> idle_trees;
  std::vector<Row> rows;
  int64_t steps = 0;

  std::thread builder;  // started by the first long prompt
  ::pid_t builder_pid = 0;
  std::condition_variable wake, built;
  std::deque<std::shared_ptr<Build>> builds;  // in order of arrival
  std::shared_ptr<Build> current;
  std::vector<std::unique_ptr<OwnTree>> retired;
  bool stopping = false;
};

SuffixCache::SuffixCache(const SuffixCacheOptions& options)
    : state_(std::make_unique<State>(options)) {}

SuffixCache::~SuffixCache() = default;

int64_t SuffixCache::start(const int32_t* prompt, int64_t size, const std::string& scope) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  Request& request = state.take_slot();
  request.running = true;
  state.running.push(state.slots, state.slot_of(request));
  request.tail.clear();
  request.tail.append(prompt, size, state.depth);
  if (state.has_shared) state.begin_shared(request, state.tree_of(scope));
  if (state.options.background_tokens >= 0 && size >= state.options.background_tokens) {
    state.build_in_background(request, prompt, size);
  } else {
    request.own = state.take_tree();
    request.own->tree.append(request.own->sequence, prompt, size);
  }
  return request.number;
}

void SuffixCache::extend(int64_t number, const int32_t* token_ids, int64_t size) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  Request& request = state.running_request(number);
  state.append_own(request, token_ids, size);
  if (request.shared == kNoSequence) return;
  state.append_shared(request, token_ids, size);
  state.keep_within_budgets(size);
}

void SuffixCache::speculate(int64_t number, const DraftOptions& options, SuffixDraft& draft) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  Request& request = state.running_request(number);
  const int32_t* context = request.tail.data(state.depth);
  int64_t size = request.tail.size(state.depth);
  int32_t own = request.own ? request.own->sequence : kNoSequence;
  state.draft_own(request, own, context, size, options, draft);
  state.draft_shared(request, request.shared, context, size, options, draft);
}

void SuffixCache::speculate_after(int64_t number,
                                  const int32_t* context,
                                  int64_t size,
                                  const DraftOptions& options,
                                  SuffixDraft& draft) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  Request& request = state.running_request(number);
  int64_t used = std::min(size, state.depth);
  context += size - used;
  // Callers mostly pass the text of the request; in this case, its position in the trees is known.
  int64_t tail_size = request.tail.size(state.depth);
  bool its_own =
      used <= tail_size &&
      std::equal(context, context + used, request.tail.data(state.depth) + (tail_size - used));
  int32_t own = its_own && request.own ? request.own->sequence : kNoSequence;
  int32_t shared = its_own ? request.shared : kNoSequence;
  state.draft_own(request, own, context, used, options, draft);
  state.draft_shared(request, shared, context, used, options, draft);
}

void SuffixCache::step(const SuffixStepParams& params) {
  std::lock_guard<std::mutex> guard(state_->mutex);
  state_->step(params);
}

void SuffixCache::stop(int64_t number) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  Request& request = state.running_request(number);
  request.running = false;
  state.running.remove(state.slots, state.slot_of(request));
  if (request.shared != kNoSequence) request.scope->tree->finish(request.shared);
  if (request.own) state.retire(std::move(request.own));
  if (request.build) {
    request.build->cancelled = true;
    request.build.reset();
    state.built.notify_all();
  }
  state.free_if_unused(request);
}

void SuffixCache::evict(int64_t number) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  Request* request = state.find(number);
  if (request == nullptr || request->shared == kNoSequence) {
    throw std::invalid_argument("request must be the number of a cached one, got " +
                                std::to_string(number));
  }
  state.evict(*request);
}

int64_t SuffixCache::add(const int32_t* token_ids, int64_t size, const std::string* scope) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  if (!state.has_shared) {
    throw std::invalid_argument("a budget is 0, so that there is no shared tree to add to");
  }
  Request& request = state.take_slot();
  int64_t number = request.number;
  state.begin_shared(request, scope ? state.tree_of(*scope) : state.common_tree());
  state.append_shared(request, token_ids, size);
  request.scope->tree->finish(request.shared);
  state.keep_within_budgets(size);
  return number;
}

int64_t SuffixCache::reclaim() {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->reclaim(state_->num_pending);
}

void SuffixCache::wait() {
  State& state = *state_;
  std::unique_lock<std::mutex> lock(state.mutex);
  state.built.wait(lock, [&] { return state.builds.empty() && state.current == nullptr; });
}

bool SuffixCache::is_running(int64_t number) const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  Request* request = state_->find(number);
  return request != nullptr && request->running;
}

bool SuffixCache::is_cached(int64_t number) const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  Request* request = state_->find(number);
  return request != nullptr && request->shared != kNoSequence;
}

std::vector<int64_t> SuffixCache::running() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->running.numbers(state_->slots);
}

std::vector<int64_t> SuffixCache::cached() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->cached.numbers(state_->slots);
}

bool SuffixCache::is_busy() const {
  if (!state_->mutex.try_lock()) return true;
  state_->mutex.unlock();
  return false;
}

bool SuffixCache::is_building(int64_t number) const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  Request* request = state_->find(number);
  return request != nullptr && request->build != nullptr;
}

int64_t SuffixCache::count(const int32_t* token_ids, int64_t size, int64_t number) const {
  State& state = *state_;
  std::unique_lock<std::mutex> lock(state.mutex);
  if (number == -1) {
    int64_t found = 0;
    state.for_each_tree(
        [&](const SharedTree& shared) { found += shared.tree->count(token_ids, size); });
    return found;
  }
  state.running_request(number);
  state.wait_for(lock, number);
  return state.running_request(number).own->tree.count(token_ids, size);
}

int64_t SuffixCache::num_cached_requests() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->cached.size;
}

int64_t SuffixCache::num_cached_tokens() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->num_tokens;
}

int64_t SuffixCache::num_common_requests() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->common ? state_->common->tree->num_sequences() : 0;
}

int64_t SuffixCache::num_scopes() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return static_cast<int64_t>(state_->trees.size());
}

int64_t SuffixCache::num_bytes() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  int64_t bytes = 0;
  state_->for_each_tree([&](const SharedTree& shared) { bytes += shared.tree->num_bytes(); });
  return bytes;
}

std::string SuffixCache::check_integrity() const {
  std::lock_guard<std::mutex> guard(state_->mutex);
  return state_->check();
}

void SuffixCache::save(const std::string& path, const std::string& label) const {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  if (!state.has_shared) {
    throw std::invalid_argument("a budget is 0, so that there is no shared tree to save");
  }
  FileWriter file(path);
  state.reclaim(state.num_pending);
  file.section(label.data(), label.size());
  std::map<const SharedTree*, int32_t> numbers;
  state.for_each_tree([&](const SharedTree& shared) {
    if (shared.tree->num_sequences() > 0) {
      numbers.emplace(&shared, static_cast<int32_t>(numbers.size()));
    }
  });
  FileHead head{.max_depth = state.depth,
                .num_requests = state.cached.size,
                .num_trees = static_cast<int64_t>(numbers.size())};
  file.section(&head, sizeof(head));
  std::vector<FilePlace> places;  // oldest first
  for (int32_t slot = state.cached.first; slot != kNoSlot; slot = state.slots[slot].younger) {
    const Request& request = state.slots[slot];
    places.push_back({.tree = numbers.at(request.scope), .handle = request.shared});
  }
  file.section(places.data(), places.size() * sizeof(FilePlace));
  state.for_each_tree([&](const SharedTree& shared) {
    if (numbers.count(&shared) == 0) return;
    std::string name = (shared.common ? kCommon : kScoped) + shared.name;
    file.section(name.data(), name.size());
    shared.tree->save(file);
  });
  file.finish();
}

std::string SuffixCache::read_label(const std::string& path) {
  FileReader file(path);
  return next_text(file);
}

void SuffixCache::load(const std::string& path) {
  State& state = *state_;
  std::lock_guard<std::mutex> guard(state.mutex);
  if (!state.has_shared) {
    throw std::invalid_argument("a budget is 0, so that there is no shared tree to load into");
  }
  if (state.cached.size > 0) {
    throw std::invalid_argument("the cache must have nothing in its shared tree, got " +
                                std::to_string(state.cached.size) + " requests");
  }
  FileReader file(path);
  auto refuse = [&](const std::string& what) {
    throw std::runtime_error("the file '" + path + "' " + what);
  };
  bool is_first = file.version() == 1;
  next_text(file);  // the label
  FileHead head{.max_depth = 0, .num_requests = 0, .num_trees = 1};
  file.section(&head, is_first ? kFirstHeadBytes : sizeof(head));
  if (head.max_depth != state.depth) {
    refuse("holds a tree of depth " + std::to_string(head.max_depth) + ", and this cache's is " +
           std::to_string(state.depth));
  }
  std::vector<FilePlace> places;
  if (is_first) {
    std::vector<int32_t> handles(file.section_bytes() / sizeof(int32_t));
    file.section(handles.data(), handles.size() * sizeof(int32_t));
    for (int32_t handle : handles) places.push_back({.tree = 0, .handle = handle});
  } else {
    places.resize(file.section_bytes() / sizeof(FilePlace));
    file.section(places.data(), places.size() * sizeof(FilePlace));
  }
  std::vector<std::pair<std::string, std::unique_ptr<SuffixTree>>> loaded;
  std::set<std::string> names;
  int64_t num_sequences = 0;
  for (int64_t i = 0; i < head.num_trees; ++i) {
    std::string name = is_first ? std::string(1, kScoped) : next_text(file);
    bool valid = !name.empty() && (name[0] == kScoped || name == std::string(1, kCommon));
    if (!valid || !names.insert(name).second) refuse("is damaged: a tree has a wrong name");
    loaded.emplace_back(name, std::make_unique<SuffixTree>(state.options.max_tree_depth));
    loaded.back().second->load(file);
    num_sequences += loaded.back().second->num_sequences();
  }
  file.finish();
  std::set<std::pair<int32_t, int32_t>> distinct;
  bool complete = static_cast<int64_t>(places.size()) == head.num_requests &&
                  num_sequences == head.num_requests;
  for (FilePlace place : places) {
    complete = complete && place.tree >= 0 && place.tree < static_cast<int64_t>(loaded.size()) &&
               loaded[place.tree].second->length(place.handle) >= 0 &&
               distinct.emplace(place.tree, place.handle).second;
  }
  if (!complete) refuse("is damaged: its requests are not those of its tree");
  std::vector<SharedTree*> trees;
  for (auto& [name, tree] : loaded) {
    bool is_common = name[0] == kCommon;
    trees.push_back(is_common ? &state.common_tree() : &state.tree_of(name.substr(1)));
    trees.back()->tree = std::move(tree);
    state.account(*trees.back());
  }
  for (FilePlace place : places) {
    Request& request = state.take_slot();
    state.join(request, *trees[place.tree]);
    request.shared = place.handle;
    state.cached.push(state.slots, state.slot_of(request));
  }
  while (state.options.max_cached_requests >= 0 &&
         state.cached.size > state.options.max_cached_requests) {
    state.evict(state.slots[state.cached.first]);
  }
  state.keep_within_budgets(0);
  state.reclaim(state.num_pending);
}

}  // namespace specops
