// SPDX-License-Identifier: Apache-2.0
// The Python class SuffixCache: accepts any hashable id for a request and lists, arrays or tensors
// of tokens, and checks arguments. `speculate` and `extend` are called for every request of every
// step, so they use the interpreter's fast call and build their results by hand.
#include <cmath>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "common/tensor_view.h"
#include "suffix_tree/ops.h"
#include "suffix_tree/suffix_cache.h"

namespace specops {
namespace {

namespace py = pybind11;

constexpr int64_t kMaxDepth = 32767;
constexpr int64_t kMaxDraftTokens = 65536;
constexpr int64_t kMaxInt32 = Checker::kMaxInt32;
// Releasing the GIL pays off from about 50 us of work on.
constexpr int64_t kLongExtend = 64;  // tokens
constexpr int64_t kLongStep = 16;    // rows

std::string at(const char* name, int64_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

constexpr const char* kProb = "a number in 0 .. 1";

// Names of the class, its methods and its arguments, as exceptions mention them: the names that the
// caller used.
struct Names {
  const char* of_class;
  const char* start;
  const char* extend;
  const char* speculate;
  const char* stop;
  const char* evict;
  const char* request_id;
  const char* prompt;
  const char* max_draft_tokens;
  const char* use_tree;
};

constexpr Names kOwnNames{
    .of_class = "SuffixCache",
    .start = "SuffixCache.start",
    .extend = "SuffixCache.extend",
    .speculate = "SuffixCache.speculate",
    .stop = "SuffixCache.stop",
    .evict = "SuffixCache.evict",
    .request_id = "request_id",
    .prompt = "prompt",
    .max_draft_tokens = "max_draft_tokens",
    .use_tree = "use_tree",
};

// The names that arctic-inference uses.
constexpr Names kDecodingCacheNames{
    .of_class = "SuffixDecodingCache",
    .start = "SuffixDecodingCache.start_request",
    .extend = "SuffixDecodingCache.add_active_response",
    .speculate = "SuffixDecodingCache.speculate",
    .stop = "SuffixDecodingCache.stop_request",
    .evict = "SuffixDecodingCache.evict_cached_response",
    .request_id = "req_id",
    .prompt = "prompt_token_ids",
    .max_draft_tokens = "max_spec_tokens",
    .use_tree = "use_tree_spec",
};

// Token ids of the caller: borrowed from an array or a tensor, copied from a list or a tuple.
class Tokens {
 public:
  Tokens(Checker& check, const char* name, PyObject* object) {
    if (PyList_Check(object) || PyTuple_Check(object)) {
      from_sequence(check, name, object);
    } else if (PyObject_CheckBuffer(object)) {
      from_buffer(check, name, object);
    } else {
      from_tensor(check, name, object);
    }
    int32_t all = 0;
    for (int64_t i = 0; i < size_; ++i) all |= data_[i];
    if (all >= 0) return;
    int64_t i = 0;
    while (data_[i] >= 0) ++i;
    check.fail(at(name, i), "at least 0", std::to_string(data_[i]));
  }
  Tokens(const Tokens&) = delete;
  Tokens& operator=(const Tokens&) = delete;

  const int32_t* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  static constexpr const char* kExpected =
      "a list of ints, or a contiguous int32 [n] array or tensor";

  void from_sequence(const Checker& check, const char* name, PyObject* object) {
    size_ = PySequence_Fast_GET_SIZE(object);
    int32_t* to = few_;
    if (size_ > kFew) {
      copied_.resize(size_);
      to = copied_.data();
    }
    for (int64_t i = 0; i < size_; ++i) {
      // The size is read again in every iteration, because the __index__ of an item may change the
      // list.
      if (i >= PySequence_Fast_GET_SIZE(object)) check.fail(name, kExpected, "a list that changes");
      PyObject* item = PySequence_Fast_GET_ITEM(object, i);
      int overflow = 0;
      long value = PyLong_CheckExact(item) ? PyLong_AsLongAndOverflow(item, &overflow) : -1;
      if (overflow != 0 || value < 0 || value > kMaxInt32) {
        auto held = py::reinterpret_borrow<py::object>(item);
        value = check.integer(at(name, i).c_str(), {item}, 0, kMaxInt32);
      }
      to[i] = static_cast<int32_t>(value);
    }
    data_ = to;
  }

  void from_buffer(const Checker& check, const char* name, PyObject* object) {
    if (PyObject_GetBuffer(object, &buffer_, PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
      PyErr_Clear();
      check.fail(name, kExpected, Checker::describe_object(object));
    }
    const char* format = buffer_.format ? buffer_.format : "B";
    if (*format == '@' || *format == '=' || *format == '<') ++format;
    bool right = (std::string(format) == "i" || std::string(format) == "l") &&
                 buffer_.itemsize == sizeof(int32_t) && buffer_.ndim == 1 &&
                 (buffer_.shape[0] <= 1 || buffer_.strides[0] == sizeof(int32_t));
    if (!right) {
      std::string got = Checker::describe_object(object);
      if (buffer_.ndim != 1) got += " of " + std::to_string(buffer_.ndim) + " dimensions";
      if (buffer_.ndim == 1 && buffer_.strides[0] != buffer_.itemsize) got += " with strides";
      check.fail(name, kExpected, got);
    }
    data_ = static_cast<const int32_t*>(buffer_.buf);
    size_ = buffer_.shape[0];
  }

  void from_tensor(Checker& check, const char* name, PyObject* object) {
    TensorView view;
    borrow_tensor(object, view);
    if (!view.is_tensor) check.fail(name, kExpected, Checker::describe_object(object));
    Dim size{"n"};
    check.tensor(name, view, {DType::kInt32}, {&size});
    if (view.dl.device.device_type != kDLCPU) check.fail(name, "on cpu", "on another device");
    data_ = view.data<int32_t>();
    size_ = size;
  }

  struct Buffer : Py_buffer {
    Buffer() : Py_buffer{} {}
    ~Buffer() {
      if (obj != nullptr) PyBuffer_Release(this);
    }
  };

  static constexpr int64_t kFew = 64;
  const int32_t* data_ = nullptr;
  int64_t size_ = 0;
  int32_t few_[kFew];
  std::vector<int32_t> copied_;
  Buffer buffer_;
};

// Returns a path in the operating system's encoding.
std::string to_path(const py::object& path) {
  PyObject* bytes = nullptr;
  if (!PyUnicode_FSConverter(path.ptr(), &bytes)) throw py::error_already_set();
  auto held = py::reinterpret_steal<py::object>(bytes);
  return {PyBytes_AS_STRING(bytes), static_cast<size_t>(PyBytes_GET_SIZE(bytes))};
}

class CacheForPython {
 public:
  CacheForPython(const py::type& draft_type,
                 const SuffixCacheOptions& options,
                 const DraftOptions& defaults,
                 const Names& names)
      : names_(names),
        cache_(options),
        defaults_(defaults),
        depth_(options.max_tree_depth),
        draft_type_(draft_type) {}

  int64_t start(const py::object& request_id, const py::object& prompt, Argument scope) {
    Checker check(names_.start);
    std::string of_scope = check.text("scope", scope, "a str");
    Tokens tokens(check, names_.prompt, prompt.ptr());
    give_up_old(check, request_id);
    int64_t number = -1;
    run(tokens.size() >= kLongExtend,
        [&] { number = cache_.start(tokens.data(), tokens.size(), of_scope); });
    int64_t other = find(check, request_id.ptr());
    if (other >= 0 && cache_.is_running(other)) {  // another thread was faster
      cache_.stop(number);
      evict_if_cached(number);
      check.fail(names_.request_id, "that of no running request", Checker::repr(request_id.ptr()));
    }
    remember(request_id, number);
    return number;
  }

  PyObject* extend(PyObject* request_id, PyObject* token_ids) {
    Checker check(names_.extend);
    Tokens tokens(check, "token_ids", token_ids);
    int64_t number = number_of(check, request_id);
    of_running(check, request_id, [&] {
      run(tokens.size() >= kLongExtend,
          [&] { cache_.extend(number, tokens.data(), tokens.size()); });
    });
    Py_RETURN_NONE;
  }

  PyObject* speculate(PyObject* const* arguments) {
    Checker check(names_.speculate);
    PyObject* request_id = arguments[0];
    DraftOptions options = defaults_;
    options.max_draft_tokens = static_cast<int32_t>(
        check.integer(names_.max_draft_tokens, {arguments[1]}, 0, kMaxDraftTokens));
    options.use_tree = check.flag(names_.use_tree, {arguments[2]});
    if (arguments[3] != Py_None) {
      options.max_spec_factor = check.number("max_spec_factor", {arguments[3]});
    }
    if (arguments[4] != Py_None) {
      constexpr double kMost = Checker::kMaxFloat;
      options.max_spec_offset =
          check.number("max_spec_offset", {arguments[4]}, -kMost, kMost, "a finite number");
    }
    if (arguments[5] != Py_None) {
      options.min_token_prob = check.number("min_token_prob", {arguments[5]}, 0, 1, kProb);
    }
    // No match is longer than the depth of the tree, and no draft is longer than the budget of its
    // match.
    float most = static_cast<float>(depth_) * options.max_spec_factor + options.max_spec_offset;
    double room = static_cast<double>(most) + 1e-6;
    if (room < options.max_draft_tokens) {
      options.max_draft_tokens = room > 0 ? static_cast<int32_t>(room) : 0;
    }

    constexpr int32_t kFew = 128;
    int32_t token_ids[kFew], parents[kFew];
    float probs[kFew];
    std::vector<int32_t> more_ints;
    std::vector<float> more_probs;
    SuffixDraft draft{.token_ids = token_ids, .parents = parents, .probs = probs};
    if (options.max_draft_tokens > kFew) {
      more_ints.resize(2 * static_cast<size_t>(options.max_draft_tokens));
      more_probs.resize(options.max_draft_tokens);
      draft.token_ids = more_ints.data();
      draft.parents = more_ints.data() + options.max_draft_tokens;
      draft.probs = more_probs.data();
    }
    int64_t number = number_of(check, request_id);
    if (arguments[6] == Py_None) {
      of_running(check, request_id, [&] {
        run(false, [&] { cache_.speculate(number, options, draft); });
      });
    } else {
      Tokens context(check, "context", arguments[6]);
      of_running(check, request_id, [&] {
        run(false, [&] {
          cache_.speculate_after(number, context.data(), context.size(), options, draft);
        });
      });
    }
    return to_python(draft);
  }

  // Runs one step, and returns num_draft_tokens. If that argument is None, the array is allocated
  // here.
  py::object step(const TensorView& requests,
                  const TensorView& new_token_ids,
                  const TensorView& num_new_tokens,
                  const TensorView& max_draft_tokens,
                  const TensorView& draft_token_ids,
                  TensorView num_draft_tokens,
                  const TensorView& num_given_drafts,
                  const TensorView& parents,
                  const TensorView& probs,
                  const TensorView& scores,
                  const TensorView& match_lens,
                  Argument use_tree) {
    Checker check("SuffixCache.step");
    Dim batch{"batch"}, width{"w"}, capacity{"k"};
    check.tensor("requests", requests, {DType::kInt64}, {&batch});
    if (requests.dl.device.device_type != kDLCPU) {
      check.fail("requests", "on cpu", "on another device");
    }
    check.tensor("new_token_ids", new_token_ids, {DType::kInt32}, {&batch, &width}, Layout::kRows);
    check.tensor("num_new_tokens", num_new_tokens, {DType::kInt32}, {&batch});
    check.tensor("max_draft_tokens", max_draft_tokens, {DType::kInt32}, {&batch});
    check.tensor(
        "draft_token_ids", draft_token_ids, {DType::kInt32}, {&batch, &capacity}, Layout::kRows);
    auto counts = py::reinterpret_borrow<py::object>(num_draft_tokens.object);
    if (!num_draft_tokens.defined()) {
      counts = py::handle(draft_token_ids.object).attr("new_empty")(batch.value);
      borrow_tensor(counts.ptr(), num_draft_tokens);
    }
    check.tensor("num_draft_tokens", num_draft_tokens, {DType::kInt32}, {&batch});
    check.optional("num_given_drafts", num_given_drafts, {DType::kInt32}, {&batch});
    check.optional("parents", parents, {DType::kInt32}, {&batch, &capacity}, Layout::kRows);
    check.optional("probs", probs, {DType::kFloat32}, {&batch, &capacity}, Layout::kRows);
    check.optional("scores", scores, {DType::kFloat32}, {&batch});
    check.optional("match_lens", match_lens, {DType::kInt32}, {&batch});
    SuffixStepParams params{
        .requests = requests.data<int64_t>(),
        .new_token_ids = new_token_ids.data<int32_t>(),
        .num_new_tokens = num_new_tokens.data<int32_t>(),
        .max_draft_tokens = max_draft_tokens.data<int32_t>(),
        .num_given_drafts = num_given_drafts.data<int32_t>(),
        .draft_token_ids = draft_token_ids.data<int32_t>(),
        .num_draft_tokens = num_draft_tokens.data<int32_t>(),
        .parents = parents.data<int32_t>(),
        .probs = probs.data<float>(),
        .scores = scores.data<float>(),
        .match_lens = match_lens.data<int32_t>(),
        .batch = batch,
        .new_stride = new_token_ids.stride(0),
        .draft_stride = draft_token_ids.stride(0),
        .parents_stride = parents.defined() ? parents.stride(0) : 0,
        .probs_stride = probs.defined() ? probs.stride(0) : 0,
        .capacity = capacity,
        .options = defaults_,
    };
    params.options.use_tree = check.flag("use_tree", use_tree);
    check_rows(check, params, width);
    if (batch == 0) return counts;
    try {
      run(batch >= kLongStep, [&] { cache_.step(params); });
    } catch (const std::invalid_argument& wrong) {
      throw std::invalid_argument("SuffixCache.step: " + std::string(wrong.what()));
    }
    return counts;
  }

  void stop(const py::object& request_id) {
    Checker check(names_.stop);
    int64_t number = number_of(check, request_id.ptr());
    of_running(check, request_id.ptr(), [&] { run(false, [&] { cache_.stop(number); }); });
  }

  void evict(const py::object& request_id) {
    Checker check(names_.evict);
    int64_t number = find(check, request_id.ptr());
    if (number < 0 || !evict_if_cached(number)) {
      check.fail(names_.request_id, "that of a cached response", Checker::repr(request_id.ptr()));
    }
  }

  bool discard(const py::object& request_id) {
    Checker check("SuffixCache.discard");
    int64_t number = find(check, request_id.ptr());
    return number >= 0 && evict_if_cached(number);
  }

  void add(const py::object& token_ids, const py::object& request_id, const py::object& scope) {
    Checker check("SuffixCache.add");
    std::string of_scope;
    if (!scope.is_none()) of_scope = check.text("scope", {scope.ptr()}, "a str, or None");
    Tokens tokens(check, "token_ids", token_ids.ptr());
    if (!request_id.is_none()) give_up_old(check, request_id);
    int64_t number = -1;
    with_name("SuffixCache.add", [&] {
      const std::string* whose = scope.is_none() ? nullptr : &of_scope;
      run(tokens.size() >= kLongExtend,
          [&] { number = cache_.add(tokens.data(), tokens.size(), whose); });
    });
    remember(request_id, number);
  }

  int64_t reclaim() {
    py::gil_scoped_release release;
    return cache_.reclaim();
  }

  void wait() {
    py::gil_scoped_release release;
    cache_.wait();
  }

  void save(const py::object& path, Argument label) {
    Checker check("SuffixCache.save");
    std::string name = to_path(path), text = check.text("label", label, "a str");
    with_name("SuffixCache.save", [&] { run(true, [&] { cache_.save(name, text); }); });
  }

  static std::string read_label(const py::object& path) {
    std::string name = to_path(path);
    std::string label;
    with_name("SuffixCache.read_label", [&] { label = SuffixCache::read_label(name); });
    return label;
  }

  void load(const py::object& path) {
    std::string name = to_path(path);
    with_name("SuffixCache.load", [&] { run(true, [&] { cache_.load(name); }); });
  }

  py::list running_requests() const { return ids_of(cache_.running()); }
  py::list cached_requests() const { return ids_of(cache_.cached()); }
  int64_t num_cached_requests() const { return cache_.num_cached_requests(); }
  int64_t num_common_requests() const { return cache_.num_common_requests(); }
  int64_t num_scopes() const { return cache_.num_scopes(); }
  int64_t num_cached_tokens() const { return cache_.num_cached_tokens(); }
  int64_t num_bytes() const { return cache_.num_bytes(); }

  int64_t count(const py::object& token_ids, const py::object& request_id) {
    Checker check("SuffixCache.count");
    Tokens tokens(check, "token_ids", token_ids.ptr());
    if (tokens.size() == 0) check.fail("token_ids", "at least one token", "none");
    int64_t found = 0;
    if (request_id.is_none()) {
      run(false, [&] { found = cache_.count(tokens.data(), tokens.size(), -1); });
      return found;
    }
    int64_t number = number_of(check, request_id.ptr());
    of_running(check, request_id.ptr(), [&] {
      run(true, [&] { found = cache_.count(tokens.data(), tokens.size(), number); });
    });
    return found;
  }

  std::string check_integrity() const {
    py::gil_scoped_release release;
    return cache_.check_integrity();
  }

 private:
  // Calls `work` without the GIL if it may take long, or if it may have to wait for another
  // thread's call.
  template <typename Work>
  void run(bool is_long, Work&& work) {
    if (is_long || cache_.is_busy()) {
      py::gil_scoped_release release;
      work();
    } else {
      work();
    }
  }

  // Converts an exception of the cache to an error message that has the id, which the cache does
  // not know.
  template <typename Work>
  void of_running(const Checker& check, PyObject* request_id, Work&& work) {
    try {
      work();
    } catch (const std::invalid_argument&) {
      check.fail(names_.request_id, "that of a running request", Checker::repr(request_id));
    }
  }

  template <typename Work>
  static void with_name(const char* name, Work&& work) {
    try {
      work();
    } catch (const std::system_error& error) {
      std::string path = error.what();
      errno = error.code().value();
      size_t end = path.rfind(": ");  // what() is the path and the system's message
      auto file = py::reinterpret_steal<py::object>(
          PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(end)));
      PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, file.ptr());
      throw py::error_already_set();
    } catch (const std::runtime_error& error) {
      throw std::invalid_argument(std::string(name) + ": " + error.what());
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(std::string(name) + ": " + error.what());
    }
  }

  // Returns the number of the request with this id; -1 if there is none and was none recently.
  int64_t find(const Checker& check, PyObject* request_id) const {
    PyObject* number = PyDict_GetItemWithError(numbers_.ptr(), request_id);
    if (number != nullptr) return PyLong_AsLongLong(number);
    if (!PyErr_Occurred()) return -1;
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    PyErr_Clear();
    check.fail(names_.request_id, "hashable", Checker::describe_object(request_id));
  }

  int64_t number_of(const Checker& check, PyObject* request_id) const {
    int64_t number = find(check, request_id);
    if (number < 0)
      check.fail(names_.request_id, "that of a running request", Checker::repr(request_id));
    return number;
  }

  // Evicts the response of an ended request, so that its id can be used again.
  void give_up_old(const Checker& check, const py::object& request_id) {
    if (request_id.is_none()) check.fail(names_.request_id, "hashable and not None", "None");
    int64_t old = find(check, request_id.ptr());
    if (old < 0) return;
    if (cache_.is_running(old)) {
      check.fail(names_.request_id, "that of no running request", Checker::repr(request_id.ptr()));
    }
    evict_if_cached(old);
  }

  bool evict_if_cached(int64_t number) {
    if (!cache_.is_cached(number)) return false;
    try {
      run(true, [&] { cache_.evict(number); });
    } catch (const std::invalid_argument&) {
      return false;  // it was evicted meanwhile
    }
    return true;
  }

  // Records the id of a request. Slots are reused, so the id of the slot's previous request is
  // removed.
  void remember(const py::object& request_id, int64_t number) {
    auto slot = static_cast<size_t>(SuffixCache::slot(number));
    if (slot >= ids_.size()) ids_.resize(slot + 1);
    Owner& owner = ids_[slot];
    if (owner.number > number) return;  // the request was evicted, and another one has its slot
    if (owner.id && !owner.id.is_none()) {
      PyObject* last = PyDict_GetItemWithError(numbers_.ptr(), owner.id.ptr());
      if (last != nullptr && PyLong_AsLongLong(last) == owner.number) {
        PyDict_DelItem(numbers_.ptr(), owner.id.ptr());
      }
      if (PyErr_Occurred()) throw py::error_already_set();
    }
    owner = {.id = request_id, .number = number};
    if (!request_id.is_none()) numbers_[request_id] = number;
  }

  py::list ids_of(const std::vector<int64_t>& numbers) const {
    py::list out;
    for (int64_t number : numbers) {
      auto slot = static_cast<size_t>(SuffixCache::slot(number));
      bool known = slot < ids_.size() && ids_[slot].number == number;
      out.append(known ? ids_[slot].id : py::none());
    }
    return out;
  }

  static void check_rows(const Checker& check, const SuffixStepParams& params, int64_t width) {
    for (int64_t b = 0; b < params.batch; ++b) {
      int64_t given = params.num_given_drafts ? params.num_given_drafts[b] : 0;
      if (given < 0 || given > params.capacity) {
        check.fail(at("num_given_drafts", b),
                   "in 0 .. k = " + std::to_string(params.capacity),
                   std::to_string(given));
      }
      if (params.requests[b] == -1) continue;
      int64_t size = params.num_new_tokens[b];
      if (size < 0 || size > width) {
        check.fail(
            at("num_new_tokens", b), "in 0 .. w = " + std::to_string(width), std::to_string(size));
      }
      if (params.max_draft_tokens[b] < 0) {
        check.fail(
            at("max_draft_tokens", b), "at least 0", std::to_string(params.max_draft_tokens[b]));
      }
      check_tokens(check, "new_token_ids", b, params.new_token_ids + b * params.new_stride, size);
      check_tokens(
          check, "draft_token_ids", b, params.draft_token_ids + b * params.draft_stride, given);
    }
  }

  static void check_tokens(
      const Checker& check, const char* name, int64_t row, const int32_t* tokens, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      if (tokens[i] < 0) {
        check.fail(
            at(name, row) + "[" + std::to_string(i) + "]", "at least 0", std::to_string(tokens[i]));
      }
    }
  }

  // Returns an instance of the Python class SuffixDraft, as the class's constructor would make it.
  PyObject* to_python(const SuffixDraft& draft) const {
    auto token_ids = py::reinterpret_steal<py::object>(PyList_New(draft.size));
    auto parents = py::reinterpret_steal<py::object>(PyList_New(draft.size));
    auto probs = py::reinterpret_steal<py::object>(PyList_New(draft.size));
    if (!token_ids || !parents || !probs) throw py::error_already_set();
    PyObject* prob = nullptr;  // reused for the next token, because most are equal
    for (int32_t i = 0; i < draft.size; ++i) {
      PyList_SET_ITEM(token_ids.ptr(), i, PyLong_FromLong(draft.token_ids[i]));
      PyList_SET_ITEM(parents.ptr(), i, PyLong_FromLong(draft.parents[i]));
      if (prob != nullptr && draft.probs[i] == draft.probs[i - 1]) {
        Py_INCREF(prob);
      } else {
        prob = PyFloat_FromDouble(draft.probs[i]);
      }
      PyList_SET_ITEM(probs.ptr(), i, prob);
    }
    auto* type = reinterpret_cast<PyTypeObject*>(draft_type_.ptr());
    PyObject* out = type->tp_alloc(type, 5);
    if (out == nullptr) throw py::error_already_set();
    PyTuple_SET_ITEM(out, 0, token_ids.release().ptr());
    PyTuple_SET_ITEM(out, 1, parents.release().ptr());
    PyTuple_SET_ITEM(out, 2, probs.release().ptr());
    PyTuple_SET_ITEM(out, 3, PyFloat_FromDouble(draft.score));
    PyTuple_SET_ITEM(out, 4, PyLong_FromLong(draft.match_len));
    return out;
  }

  struct Owner {
    py::object id;
    int64_t number = -1;
  };

  const Names& names_;
  mutable SuffixCache cache_;
  DraftOptions defaults_;
  int32_t depth_;
  py::type draft_type_;
  py::dict numbers_;        // number of each id, including some that are no longer in use
  std::vector<Owner> ids_;  // last request of each slot
};

std::unique_ptr<CacheForPython> make(const py::type& draft_type,
                                     Argument max_tree_depth,
                                     Argument max_cached_requests,
                                     Argument max_spec_factor,
                                     Argument min_token_prob,
                                     Argument max_cached_tokens,
                                     Argument max_cached_bytes,
                                     Argument read_on,
                                     Argument background_tokens,
                                     bool decoding_cache_names) {
  const Names& names = decoding_cache_names ? kDecodingCacheNames : kOwnNames;
  Checker check(names.of_class);
  SuffixCacheOptions options{
      .max_tree_depth =
          static_cast<int32_t>(check.integer("max_tree_depth", max_tree_depth, 1, kMaxDepth)),
      .max_cached_requests = check.integer("max_cached_requests", max_cached_requests, -1),
      .max_cached_tokens = check.integer("max_cached_tokens", max_cached_tokens, -1),
      .max_cached_bytes = check.integer("max_cached_bytes", max_cached_bytes, -1),
      .background_tokens = check.integer("background_tokens", background_tokens, -1),
  };
  if (options.background_tokens == 0) check.fail("background_tokens", "-1, or at least 1", "0");
  DraftOptions defaults{
      .max_spec_factor = check.number("max_spec_factor", max_spec_factor),
      .min_token_prob = check.number("min_token_prob", min_token_prob, 0, 1, kProb),
      .read_on = check.flag("read_on", read_on),
  };
  return std::make_unique<CacheForPython>(draft_type, options, defaults, names);
}

// Wraps a call in the way pybind11 wraps its own functions.
template <typename Call>
PyObject* guarded(Call&& call) {
  try {
    return call();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Returns the C++ object behind `self`. The interpreter has checked the class of `self`.
CacheForPython& cache_of(PyObject* self) {
  auto* instance = reinterpret_cast<py::detail::instance*>(self);
  auto* cache = instance->simple_layout
                    ? static_cast<CacheForPython*>(instance->simple_value_holder[0])
                    : py::cast<CacheForPython*>(py::handle(self));
  if (cache == nullptr) throw std::invalid_argument("SuffixCache: __init__ has not been called");
  return *cache;
}

void check_count(const char* name, Py_ssize_t got, Py_ssize_t wanted) {
  if (got == wanted) return;
  PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, wanted, got);
  throw py::error_already_set();
}

PyObject* extend(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    check_count("SuffixCache.extend", count, 2);
    return cache_of(self).extend(arguments[0], arguments[1]);
  });
}

PyObject* speculate(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    check_count("SuffixCache.speculate", count, 7);
    return cache_of(self).speculate(arguments);
  });
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

void register_suffix_cache(py::module_& m) {
  py::class_<CacheForPython> cache(m, "SuffixCache");
  cache.def(py::init(&make))
      .def("start", &CacheForPython::start)
      .def("step", &CacheForPython::step)
      .def("stop", &CacheForPython::stop)
      .def("evict", &CacheForPython::evict)
      .def("discard", &CacheForPython::discard)
      .def("add", &CacheForPython::add)
      .def("reclaim", &CacheForPython::reclaim)
      .def("wait", &CacheForPython::wait)
      .def("save", &CacheForPython::save)
      .def_static("read_label", &CacheForPython::read_label)
      .def("load", &CacheForPython::load)
      .def("running_requests", &CacheForPython::running_requests)
      .def("cached_requests", &CacheForPython::cached_requests)
      .def("num_cached_requests", &CacheForPython::num_cached_requests)
      .def("num_cached_tokens", &CacheForPython::num_cached_tokens)
      .def("num_common_requests", &CacheForPython::num_common_requests)
      .def("num_scopes", &CacheForPython::num_scopes)
      .def("num_bytes", &CacheForPython::num_bytes)
      .def("count", &CacheForPython::count)
      .def("check_integrity", &CacheForPython::check_integrity);
  static PyMethodDef methods[] = {
      {"extend", fast(&extend), METH_FASTCALL, nullptr},
      {"speculate", fast(&speculate), METH_FASTCALL, nullptr},
  };
  auto* type = reinterpret_cast<PyTypeObject*>(cache.ptr());
  for (PyMethodDef& method : methods) {
    auto function = py::reinterpret_steal<py::object>(PyDescr_NewMethod(type, &method));
    cache.attr(method.ml_name) = function;
  }
}

}  // namespace specops
