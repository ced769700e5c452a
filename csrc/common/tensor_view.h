// SPDX-License-Identifier: Apache-2.0
// Conversion of tensor arguments: a pybind11 caster that uses torch's DLPack exchange table (no
// libtorch), and the argument checker. Every error message names the op, the argument, what was
// expected and what it got.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
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

// A borrowed view of a tensor argument, valid during the call. The caster accepts any Python
// object, so that Checker can explain what is wrong; a pybind11 overload error would not.
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

  // Returns nullptr only if the argument is absent. A tensor without elements has a non-null
  // address that is never read.
  template <typename T>
  T* data() const {
    constexpr uintptr_t kNobody = 64;
    if (!defined()) return nullptr;
    return static_cast<T*>(dl.data != nullptr ? raw() : reinterpret_cast<void*>(kNobody));
  }
};

// A borrowed argument that is not a tensor. The caster accepts any Python object, as for
// TensorView.
struct Argument {
  PyObject* object = nullptr;

  bool defined() const { return object != nullptr && object != Py_None; }
};

// torch's DLPack exchange table, from the last borrowed tensor.
inline const DLPackExchangeAPI* exchange_api = nullptr;

// Returns whether the memory ranges of two tensors, from first to last element, overlap.
inline bool overlap(const TensorView& a, const TensorView& b) {
  auto last_byte = [](const TensorView& view) {
    int64_t last = 0;
    for (int axis = 0; axis < view.ndim(); ++axis)
      last += (view.size(axis) - 1) * view.stride(axis);
    return static_cast<char*>(view.raw()) + (last + 1) * dtype_bytes(view.dtype()) - 1;
  };
  return a.raw() <= last_byte(b) && b.raw() <= last_byte(a);
}

// Returns whether an object is a torch FakeTensor, which stands for a tensor in a traced graph and
// has no memory.
inline bool is_fake(PyObject* object) {
  return std::strcmp(Py_TYPE(object)->tp_name, "FakeTensor") == 0;
}

// Fills the view from a torch tensor. Leaves is_tensor false for any other object, and for tensors
// without plain memory: meta, fake, sparse, nested or quantized ones.
inline void borrow_tensor(PyObject* object, TensorView& view) {
  static PyTypeObject* cached_type = nullptr;
  static const DLPackExchangeAPI* cached_api = nullptr;
  view.object = object;
  PyTypeObject* type = Py_TYPE(object);
  const DLPackExchangeAPI* api = type == cached_type ? cached_api : nullptr;
  if (api == nullptr) {
    // Do not ask a fake tensor for its memory: it would emit a warning before it refuses.
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

// Error message for a tensor that requires gradients while torch records them.
constexpr const char* kNoGradient =
    "a tensor that needs no gradient, since the ops have no backward (detach it, or use "
    "torch.no_grad())";

// Converts the True or False that a torch call returned to a bool; steals the reference.
inline bool is_true(PyObject* answer) {
  if (answer == nullptr) throw pybind11::error_already_set();
  Py_DECREF(answer);
  return answer == Py_True;
}

// Returns whether torch records this thread's computations for gradients.
inline bool is_grad_enabled() {
  // Not a thread-safe static initializer: the import may let another thread run and enter here.
  static PyObject* function = nullptr;
  if (function == nullptr) {
    pybind11::object found = pybind11::module_::import("torch").attr("is_grad_enabled");
    function = found.release().ptr();
  }
  return is_true(PyObject_CallNoArgs(function));
}

// Returns whether torch would record gradients for this tensor. Calls the descriptor of
// Tensor.requires_grad directly, which avoids an attribute look-up.
inline bool requires_grad(PyObject* tensor) {
  static PyObject* descriptor = nullptr;
  if (descriptor == nullptr) {
    pybind11::object type = pybind11::module_::import("torch._C").attr("TensorBase");
    pybind11::object found = type.attr("requires_grad");
    descriptor = found.release().ptr();
  }
  return is_true(Py_TYPE(descriptor)->tp_descr_get(descriptor, tensor, nullptr));
}

// A named dimension. If its size is not set, it takes the first size that it is compared with;
// later sizes must equal it.
struct Dim {
  const char* name;
  int64_t value = -1;
  operator int64_t() const { return value; }
};

enum class Layout {
  kContiguous,  // row-major without gaps
  kRows,        // the stride of the rows is free; each row is contiguous
};

class Checker {
 public:
  static constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();
  static constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
  static constexpr double kMaxFloat = std::numeric_limits<float>::max();

  explicit Checker(const char* op) : op_(op) {}

  // Checks one tensor and returns it. `dims` are Dim objects, whose sizes are set on first use.
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

  // Checks one tensor argument that may be None.
  const TensorView& optional(const char* name,
                             const TensorView& view,
                             std::initializer_list<DType> dtypes,
                             std::initializer_list<Dim*> dims,
                             Layout layout = Layout::kContiguous) {
    if (view.defined()) tensor(name, view, dtypes, dims, layout);
    return view;
  }

  // Reads the fields of a NamedTuple of the Python type `type`. For None, all fields are absent.
  template <size_t kCount>
  std::array<TensorView, kCount> fields(const char* name, const char* type, Argument got) const {
    std::array<TensorView, kCount> views;
    if (!got.defined()) return views;
    if (!PyTuple_Check(got.object) || PyTuple_GET_SIZE(got.object) != Py_ssize_t{kCount}) {
      fail(name, std::string("a ") + type, describe_object(got.object));
    }
    for (size_t i = 0; i < kCount; ++i) {
      PyObject* field = PyTuple_GET_ITEM(got.object, static_cast<Py_ssize_t>(i));
      views[i].object = field;
      if (field != Py_None) borrow_tensor(field, views[i]);
    }
    return views;
  }

  // Reads either one number for all rows, or a tensor with one number per row; None gives `absent`.
  // one_of: how error messages describe the int.
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

  // Reads an int from `low` to `high`. Rejects bools, tensors, and numbers that would have to be
  // rounded.
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

  // Reads a number from `low` to `high` that is finite as a float32. `expected` describes it in
  // error messages.
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
    if (PyErr_Occurred()) clear_error();  // an unpaired surrogate cannot be encoded
    fail(name, expected, describe_object(got.object));
  }

  // Checks a condition on a value: check.that(k >= 0, "k", "at least 0", k).
  template <typename T>
  void that(bool condition, const char* name, const std::string& expected, const T& got) {
    if (condition) return;
    if constexpr (std::is_arithmetic_v<T>) {
      fail(name, expected, std::to_string(got));
    } else {
      fail(name, expected, std::string(got));
    }
  }

  // Checks that a tensor starts at a multiple of 16 bytes, because CUDA kernels read or write it in
  // vectors.
  void on_16_bytes(const char* name, const TensorView& view) const {
    auto past = reinterpret_cast<uintptr_t>(view.raw()) % 16;
    if (past == 0) return;
    fail(name,
         "aligned to 16 bytes",
         "an address " + std::to_string(past) + " bytes past a multiple of 16");
  }

  // Throws the error of `fault`, if a check of values found one.
  void refuse(const Fault& fault) const {
    if (fault.found()) raise(fault);
  }

  [[noreturn]] void fail(const std::string& name,
                         const std::string& expected,
                         const std::string& got) const {
    throw std::invalid_argument(std::string(op_) + ": " + name + " must be " + expected + ", got " +
                                got);
  }

  // Returns whether the op runs on CUDA. All tensors of an op must be on the same device.
  bool on_cuda() const { return device_.device_type == kDLCUDA || interprets_cuda(); }

  // Returns the caller's current stream on the device of the tensors.
  CudaStream stream() const {
    if (interprets_cuda()) return {};
    void* handle = nullptr;
    if (exchange_api->current_work_stream(kDLCUDA, device_.device_id, &handle) != 0) {
      throw pybind11::error_already_set();
    }
    return {handle, device_.device_id};
  }

  // Returns the error flag with which CUDA kernels report invalid data; CPU ops throw instead.
  ErrorFlag error_flag() const {
    return on_cuda() ? specops::error_flag(device_.device_id) : ErrorFlag{};
  }

  // Describes an object that is not a tensor, or is a tensor without plain memory, for an error
  // message. Numbers and text are shown as they are.
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
    if (!text) {  // an int with too many digits, or an object whose repr fails
      clear_error();
      return Py_TYPE(object)->tp_name;
    }
    std::string out = pybind11::str(text);
    size_t most = 80;
    if (out.size() <= most) return out;
    while ((out[most] & 0xc0) == 0x80) --most;  // do not split a character
    return out.substr(0, most) + "...";
  }

 private:
  // Asks torch only once per op, at the first tensor that could require a gradient.
  bool records_gradients() {
    if (!knows_gradients_) records_gradients_ = is_grad_enabled();
    knows_gradients_ = true;
    return records_gradients_;
  }

  // Clears a Python exception that means only that the object has another type.
  static void clear_error() {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw pybind11::error_already_set();
    PyErr_Clear();
  }

  // Returns whether an object is a number of Python or numpy. Tensors and arrays are not, even with
  // one element.
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

  // The fault is passed by value, so that a checking loop can keep it in registers.
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

  // Returns whether a tensor has the layout. An empty tensor is never read, so its strides do not
  // matter: numpy sets them to 0.
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

  // Returns the name of a torch dtype without "torch.", such as "float16", like dtype_name().
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
  DLDevice device_{kDLCPU, 0};   // device of the first tensor checked
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
