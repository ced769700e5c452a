// SPDX-License-Identifier: Apache-2.0
// How tensors enter C++: a pybind11 caster over torch's DLPack exchange table (no libtorch), and the
// one argument checker. Every message names op, argument, expected and got.
#pragma once

#include <pybind11/pybind11.h>

#include <cstring>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/cuda_stream.h"
#include "common/dlpack.h"
#include "common/dtype.h"
#include "common/error_flag.h"
#include "common/error_sentence.h"
#include "common/per_row.h"

namespace specops {

// A borrowed view of a tensor argument: valid for the duration of the call. Any Python object loads;
// what is wrong with it is said by Checker, in words, instead of by an overload error.
struct TensorView {
  DLTensor dl{};
  PyObject* object = nullptr;
  bool is_tensor = false;

  bool defined() const { return object != nullptr && object != Py_None; }
  int ndim() const { return dl.ndim; }
  int64_t size(int axis) const { return dl.shape[axis]; }
  int64_t stride(int axis) const { return dl.strides[axis]; }

  DType dtype() const {
    if (dl.dtype.lanes != 1) return DType::kOther;
    switch (dl.dtype.code) {
      case kDLFloat:
        return dl.dtype.bits == 32   ? DType::kFloat32
               : dl.dtype.bits == 16 ? DType::kFloat16
                                     : DType::kOther;
      case kDLBfloat:
        return dl.dtype.bits == 16 ? DType::kBFloat16 : DType::kOther;
      case kDLFloat8_e4m3fn:
        return DType::kFloat8E4M3;
      case kDLInt:
        return dl.dtype.bits == 32   ? DType::kInt32
               : dl.dtype.bits == 64 ? DType::kInt64
               : dl.dtype.bits == 8  ? DType::kInt8
                                     : DType::kOther;
      case kDLUInt:
        return dl.dtype.bits == 8 ? DType::kUInt8 : DType::kOther;
      case kDLBool:
        return DType::kBool;
      default:
        return DType::kOther;
    }
  }

  void* raw() const { return static_cast<char*>(dl.data) + dl.byte_offset; }

  // nullptr only of what is absent: a tensor without elements is an address that nobody reads.
  template <typename T>
  T* data() const {
    constexpr uintptr_t kNobody = 64;
    if (!defined()) return nullptr;
    return static_cast<T*>(dl.data != nullptr ? raw() : reinterpret_cast<void*>(kNobody));
  }
};

// A borrowed argument that is no tensor. Any Python object loads here as well.
struct Argument {
  PyObject* object = nullptr;

  bool defined() const { return object != nullptr && object != Py_None; }
};

// torch's table, as the last tensor borrowed had it.
inline const DLPackExchangeAPI* exchange_api = nullptr;

// Whether the memory from the first element to the last of one meets that of the other.
inline bool overlap(const TensorView& a, const TensorView& b) {
  auto last_byte = [](const TensorView& view) {
    int64_t last = 0;
    for (int axis = 0; axis < view.ndim(); ++axis)
      last += (view.size(axis) - 1) * view.stride(axis);
    return static_cast<char*>(view.raw()) + (last + 1) * dtype_bytes(view.dtype()) - 1;
  };
  return a.raw() <= last_byte(b) && b.raw() <= last_byte(a);
}

// A tensor of torch's that stands for one which a graph will compute; it has no memory.
inline bool is_fake(PyObject* object) {
  return std::strcmp(Py_TYPE(object)->tp_name, "FakeTensor") == 0;
}

// Fills the view from a torch tensor; leaves is_tensor false for anything else, and for tensors
// without plain memory: meta, fake, sparse, nested or quantized ones.
inline void borrow_tensor(PyObject* object, TensorView& view) {
  static PyTypeObject* cached_type = nullptr;
  static const DLPackExchangeAPI* cached_api = nullptr;
  view.object = object;
  PyTypeObject* type = Py_TYPE(object);
  const DLPackExchangeAPI* api = type == cached_type ? cached_api : nullptr;
  if (api == nullptr) {
    // Asked for its memory, a fake tensor warns before it refuses.
    if (PyLong_Check(object) || PyFloat_Check(object) || is_fake(object)) return;
    PyObject* capsule =
        PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
    if (capsule == nullptr) {
      PyErr_Clear();
      return;
    }
    api =
        static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    if (api == nullptr) throw pybind11::error_already_set();
    if (api->header.version.major != DLPACK_MAJOR_VERSION ||
        api->dltensor_from_py_object_no_sync == nullptr) {
      throw std::runtime_error("specops: this torch offers no DLPack 1.x exchange table");
    }
    cached_type = type;
    cached_api = api;
    exchange_api = api;
  }
  if (api->dltensor_from_py_object_no_sync(object, &view.dl) != 0) {
    PyErr_Clear();
    return;
  }
  view.is_tensor = true;
  if (view.dl.data != nullptr) return;
  for (int axis = 0; axis < view.ndim(); ++axis) {
    if (view.size(axis) == 0) return;
  }
  view.is_tensor = false;
}

// What a tensor must be while torch records what is computed.
constexpr const char* kNoGradient =
    "a tensor that needs no gradient, since the ops have no backward (detach it, or use "
    "torch.no_grad())";

// Answers of torch's that are True or False.
inline bool is_true(PyObject* answer) {
  if (answer == nullptr) throw pybind11::error_already_set();
  Py_DECREF(answer);
  return answer == Py_True;
}

// Whether torch records what this thread computes, to compute gradients.
inline bool is_grad_enabled() {
  // No initialiser that C++ would lock: an import may let another thread in here.
  static PyObject* function = nullptr;
  if (function == nullptr) {
    pybind11::object found = pybind11::module_::import("torch").attr("is_grad_enabled");
    function = found.release().ptr();
  }
  return is_true(PyObject_CallNoArgs(function));
}

// Whether it would of this tensor: by the descriptor that Tensor.requires_grad stands for, without the
// look-up of its name.
inline bool requires_grad(PyObject* tensor) {
  static PyObject* descriptor = nullptr;
  if (descriptor == nullptr) {
    pybind11::object type = pybind11::module_::import("torch._C").attr("TensorBase");
    pybind11::object found = type.attr("requires_grad");
    descriptor = found.release().ptr();
  }
  return is_true(Py_TYPE(descriptor)->tp_descr_get(descriptor, tensor, nullptr));
}

// A dimension with a name. Unset ones take the first size they meet and must agree after that.
struct Dim {
  const char* name;
  int64_t value = -1;
  operator int64_t() const { return value; }
};

enum class Layout {
  kContiguous,  // row-major without gaps
  kRows,        // the first stride is free, each row is contiguous
};

class Checker {
 public:
  static constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();
  static constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
  static constexpr double kMaxFloat = std::numeric_limits<float>::max();

  explicit Checker(const char* op) : op_(op) {}

  // Checks one tensor and returns it. `dims` are Dim objects, bound on first use.
  const TensorView& tensor(const char* name,
                           const TensorView& view,
                           std::initializer_list<DType> dtypes,
                           std::initializer_list<Dim*> dims,
                           Layout layout = Layout::kContiguous) {
    if (!view.is_tensor) {
      fail(name, expected(dtypes, dims), describe_object(view.object));
    }
    bool dtype_ok = false;
    for (DType dtype : dtypes) dtype_ok = dtype_ok || view.dtype() == dtype;
    bool shape_ok = view.ndim() == static_cast<int>(dims.size());
    if (shape_ok) {
      int axis = 0;
      for (Dim* dim : dims) {
        int64_t size = view.size(axis++);
        if (dim->value < 0) {
          dim->value = size;
        } else if (dim->value != size) {
          shape_ok = false;
        }
      }
    }
    if (!dtype_ok || !shape_ok) fail(name, expected(dtypes, dims), describe(view));
    if (!has_layout(view, layout)) {
      fail(name,
           layout == Layout::kContiguous ? "contiguous"
                                         : "made of contiguous rows that do not overlap",
           "strides " + list(view.dl.strides, view.ndim()) + " for shape " +
               list(view.dl.shape, view.ndim()));
    }
    check_device(name, view.dl.device);
    bool is_real = view.dl.dtype.code == kDLFloat || view.dl.dtype.code == kDLBfloat;
    if (is_real && records_gradients() && requires_grad(view.object)) {
      fail(name, kNoGradient, "requires_grad=True");
    }
    return view;
  }

  // The same for an argument that may be None.
  const TensorView& optional(const char* name,
                             const TensorView& view,
                             std::initializer_list<DType> dtypes,
                             std::initializer_list<Dim*> dims,
                             Layout layout = Layout::kContiguous) {
    if (view.defined()) tensor(name, view, dtypes, dims, layout);
    return view;
  }

  // A number for all rows, or a tensor with one each; None is `absent`. one_of: what an int is called.
  template <typename T>
  PerRow<T> per_row(const char* name,
                    const TensorView& view,
                    Dim& count,
                    T absent,
                    const char* one_of = "an int") {
    constexpr bool kIsReal = std::is_floating_point_v<T>;
    constexpr DType kDType = kIsReal ? DType::kFloat32 : DType::kInt32;
    if (!view.defined()) return {nullptr, absent};
    if (view.is_tensor) {
      tensor(name, view, {kDType}, {&count});
      return {view.data<T>(), absent};
    }
    T value{};
    if (read_number(view.object, value)) return {nullptr, value};
    bool is_int = !kIsReal && PyLong_Check(view.object) && !PyBool_Check(view.object);
    std::string number = kIsReal ? "a number" : one_of;
    fail(name,
         is_int ? "an int32" : number + " or " + expected({kDType}, {&count}),
         describe_object(view.object));
  }

  // An int from `low` to `high`. Never a bool, a tensor, or anything that would be rounded.
  int64_t integer(const char* name, Argument got, int64_t low, int64_t high = kMaxInt64) const {
    int64_t value = 0;
    if (as_int64(got.object, value) && value >= low && value <= high) return value;
    std::string from = std::to_string(low);
    fail(name,
         high == kMaxInt64   ? "an int of at least " + from
         : high == kMaxInt32 ? "an int32 of at least " + from
                             : "an int in " + from + " .. " + std::to_string(high),
         describe_object(got.object));
  }

  // A number from `low` to `high`, which `expected` says in words; finite as a float32.
  float number(const char* name,
               Argument got,
               double low = 0,
               double high = kMaxFloat,
               const char* expected = "a finite number of at least 0") const {
    double value = 0;
    bool fits = as_double(got.object, value) && value >= low && value <= high;
    if (!fits) fail(name, expected, describe_object(got.object));
    return static_cast<float>(value);
  }

  bool flag(const char* name, Argument got) const {
    if (!PyBool_Check(got.object)) fail(name, "a bool", describe_object(got.object));
    return got.object == Py_True;
  }

  std::string text(const char* name, Argument got, const std::string& expected) const {
    Py_ssize_t size = 0;
    const char* bytes = nullptr;
    if (PyUnicode_Check(got.object)) bytes = PyUnicode_AsUTF8AndSize(got.object, &size);
    if (bytes != nullptr) return {bytes, static_cast<size_t>(size)};
    if (PyErr_Occurred()) clear_error();  // a half of a surrogate pair
    fail(name, expected, describe_object(got.object));
  }

  // A condition on a value: check.that(k >= 0, "k", "at least 0", k).
  template <typename T>
  void that(bool condition, const char* name, const std::string& expected, const T& got) {
    if (condition) return;
    if constexpr (std::is_arithmetic_v<T>) {
      fail(name, expected, std::to_string(got));
    } else {
      fail(name, expected, std::string(got));
    }
  }

  // For what CUDA kernels read and write in vectors.
  void on_16_bytes(const char* name, const TensorView& view) const {
    auto past = reinterpret_cast<uintptr_t>(view.raw()) % 16;
    if (past == 0) return;
    fail(name,
         "aligned to 16 bytes",
         "an address " + std::to_string(past) + " bytes past a multiple of 16");
  }

  // Raises what a rule about values has found, if anything.
  void refuse(const Fault& fault) const {
    if (fault.found()) raise(fault);
  }

  [[noreturn]] void fail(const std::string& name,
                         const std::string& expected,
                         const std::string& got) const {
    throw std::invalid_argument(std::string(op_) + ": " + name + " must be " + expected + ", got " +
                                got);
  }

  // Where the op runs: on the device of its tensors, which must all be on one.
  bool on_cuda() const { return device_.device_type == kDLCUDA || interprets_cuda(); }

  // The caller's current stream on that device.
  CudaStream stream() const {
    if (interprets_cuda()) return {};
    void* handle = nullptr;
    if (exchange_api->current_work_stream(kDLCUDA, device_.device_id, &handle) != 0) {
      throw pybind11::error_already_set();
    }
    return {handle, device_.device_id};
  }

  // Where a CUDA kernel reports wrong data; CPU ops raise.
  ErrorFlag error_flag() const {
    return on_cuda() ? specops::error_flag(device_.device_id) : ErrorFlag{};
  }

  // Something that is no tensor, or a tensor without plain memory. Numbers and text as they are.
  static std::string describe_object(PyObject* object) {
    if (object == nullptr || object == Py_None) return "None";
    if (PyLong_Check(object) || PyFloat_Check(object) || PyUnicode_Check(object)) {
      return repr(object);
    }
    std::string out = Py_TYPE(object)->tp_name;
    for (const char* name : {"dtype", "layout", "device"}) {
      pybind11::object value = pybind11::getattr(object, name, pybind11::none());
      if (!value.is_none()) out += " " + torch_name(value);
    }
    if (is_fake(object)) {
      out +=
          " (for torch.compile and torch.export, which needs strict=True, import specops.torch_ops;"
          " other tracers call the ops in its OPS)";
    }
    return out;
  }

  static std::string repr(PyObject* object) {
    auto text = pybind11::reinterpret_steal<pybind11::object>(PyObject_Repr(object));
    if (!text) {  // an int of too many digits, or an object that cannot say
      clear_error();
      return Py_TYPE(object)->tp_name;
    }
    std::string out = pybind11::str(text);
    size_t most = 80;
    if (out.size() <= most) return out;
    while ((out[most] & 0xc0) == 0x80) --most;  // not within a character
    return out.substr(0, most) + "...";
  }

 private:
  // Asked for once, by the first tensor that could need a gradient.
  bool records_gradients() {
    if (!knows_gradients_) records_gradients_ = is_grad_enabled();
    knows_gradients_ = true;
    return records_gradients_;
  }

  // Of an exception that only says that an object is of another kind.
  static void clear_error() {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw pybind11::error_already_set();
    PyErr_Clear();
  }

  // Numbers are Python's and numpy's; a tensor or an array is none, even of one element.
  static bool may_be_number(PyObject* object) {
    return !PyBool_Check(object) && !PyObject_HasAttrString(object, "__dlpack__");
  }

  static bool as_int64(PyObject* object, int64_t& value) {
    pybind11::object index;
    if (!PyLong_Check(object) || PyBool_Check(object)) {
      if (!may_be_number(object) || !PyIndex_Check(object)) return false;
      index = pybind11::reinterpret_steal<pybind11::object>(PyNumber_Index(object));
      if (!index) {
        clear_error();
        return false;
      }
      object = index.ptr();
    }
    int overflow = 0;
    value = PyLong_AsLongLongAndOverflow(object, &overflow);
    return overflow == 0;
  }

  static bool as_double(PyObject* object, double& value) {
    if (!PyFloat_Check(object)) {
      const PyNumberMethods* methods = Py_TYPE(object)->tp_as_number;
      bool has_value = methods != nullptr && (methods->nb_float || methods->nb_index);
      bool is_int = PyLong_Check(object) && !PyBool_Check(object);
      if (!has_value || (!is_int && !may_be_number(object))) return false;
    }
    value = PyFloat_AsDouble(object);
    if (value != -1.0 || !PyErr_Occurred()) return true;
    clear_error();
    return false;
  }

  static bool read_number(PyObject* object, float& value) {
    double wide = 0;
    if (!as_double(object, wide)) return false;
    value = static_cast<float>(wide);
    return true;
  }

  static bool read_number(PyObject* object, int32_t& value) {
    int64_t wide = 0;
    if (!as_int64(object, wide)) return false;
    value = static_cast<int32_t>(wide);
    return value == wide;
  }

  // By value: a loop keeps in registers what it checks.
  [[noreturn, gnu::noinline]] static void raise(Fault fault) {
    throw std::invalid_argument(error_sentence(fault));
  }

  void check_device(const char* name, DLDevice device) {
    bool known = device.device_type == kDLCPU || (has_cuda() && device.device_type == kDLCUDA);
    if (!known) {
      fail(name,
           has_cuda() ? "on cpu or cuda" : "on cpu (this build has no CUDA kernels)",
           "on " + device_name(device));
    }
    if (first_ == nullptr) {
      first_ = name;
      device_ = device;
    } else if (device.device_type != device_.device_type || device.device_id != device_.device_id) {
      fail(name, "on " + device_name(device_) + " like " + first_, "on " + device_name(device));
    }
  }

  // Nothing is read of an empty tensor, so its strides may be anything: numpy's are 0.
  static bool has_layout(const TensorView& view, Layout layout) {
    for (int axis = 0; axis < view.ndim(); ++axis) {
      if (view.size(axis) == 0) return true;
    }
    int64_t expected = 1;
    for (int axis = view.ndim() - 1; axis >= 0; --axis) {
      bool free = layout == Layout::kRows && axis == 0;
      if (view.size(axis) != 1 && !free && view.stride(axis) != expected) return false;
      if (free && view.size(axis) != 1 && view.stride(axis) < expected) return false;
      expected *= view.size(axis);
    }
    return true;
  }

  static std::string list(const int64_t* values, int count) {
    std::string out = "[";
    for (int i = 0; i < count; ++i) out += (i ? ", " : "") + std::to_string(values[i]);
    return out + "]";
  }

  static std::string expected(std::initializer_list<DType> dtypes,
                              std::initializer_list<Dim*> dims) {
    std::string out;
    for (DType dtype : dtypes) out += (out.empty() ? "" : "|") + std::string(dtype_name(dtype));
    out += " [";
    bool first = true;
    for (Dim* dim : dims) {
      if (!first) out += ", ";
      first = false;
      out += dim->name;
      if (dim->value >= 0) out += "=" + std::to_string(dim->value);
    }
    return out + "]";
  }

  // "float16" for torch.float16, as dtype_name() writes it.
  static std::string torch_name(const pybind11::object& value) {
    std::string name = pybind11::str(value);
    return name.rfind("torch.", 0) == 0 ? name.substr(6) : name;
  }

  static std::string describe(const TensorView& view) {
    DType dtype = view.dtype();
    std::string name = dtype_name(dtype);
    if (dtype == DType::kOther) {
      name = torch_name(pybind11::getattr(view.object, "dtype"));
    }
    return name + " " + list(view.dl.shape, view.ndim());
  }

  static std::string device_name(DLDevice device) {
    if (device.device_type == kDLCPU) return "cpu";
    if (device.device_type == kDLCUDA) return "cuda:" + std::to_string(device.device_id);
    return "DLPack device type " + std::to_string(static_cast<int>(device.device_type));
  }

  const char* op_;
  const char* first_ = nullptr;  // name of the first tensor checked
  DLDevice device_{kDLCPU, 0};   // and its device
  bool knows_gradients_ = false;
  bool records_gradients_ = false;
};

}  // namespace specops

namespace pybind11::detail {

template <>
struct type_caster<specops::TensorView> {
  PYBIND11_TYPE_CASTER(specops::TensorView, const_name("Tensor"));

  bool load(handle source, bool /*convert*/) {
    value.object = source.ptr();
    if (source.ptr() != Py_None) specops::borrow_tensor(source.ptr(), value);
    return true;
  }
};

template <>
struct type_caster<specops::Argument> {
  PYBIND11_TYPE_CASTER(specops::Argument, const_name("object"));

  bool load(handle source, bool /*convert*/) {
    value.object = source.ptr();
    return true;
  }
};

}  // namespace pybind11::detail
