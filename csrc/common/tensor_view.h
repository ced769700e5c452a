// SPDX-License-Identifier: Apache-2.0
// How tensors enter C++: a pybind11 caster over torch's DLPack exchange table (no libtorch), and the
// one argument checker. Every message names op, argument, expected and got.
#pragma once

#include <pybind11/pybind11.h>

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

// Fills the view from a torch tensor; leaves is_tensor false for anything else, and for tensors
// without plain memory: meta, fake, sparse, nested or quantized ones.
inline void borrow_tensor(PyObject* object, TensorView& view) {
  static PyTypeObject* cached_type = nullptr;
  static const DLPackExchangeAPI* cached_api = nullptr;
  view.object = object;
  PyTypeObject* type = Py_TYPE(object);
  const DLPackExchangeAPI* api = type == cached_type ? cached_api : nullptr;
  if (api == nullptr) {
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

  // A number for all rows, or a tensor with one each; None is `absent`.
  template <typename T>
  PerRow<T> per_row(const char* name, const TensorView& view, Dim& count, T absent) {
    constexpr bool kIsReal = std::is_floating_point_v<T>;
    constexpr DType kDType = kIsReal ? DType::kFloat32 : DType::kInt32;
    if (!view.defined()) return {nullptr, absent};
    if (view.is_tensor) {
      tensor(name, view, {kDType}, {&count});
      return {view.data<T>(), absent};
    }
    bool is_number = PyLong_Check(view.object) || (kIsReal && PyFloat_Check(view.object));
    if (!is_number || PyBool_Check(view.object)) {
      fail(name,
           (kIsReal ? "a number or " : "an int or ") + expected({kDType}, {&count}),
           describe_object(view.object));
    }
    if constexpr (kIsReal) {
      double value = PyFloat_AsDouble(view.object);
      if (PyErr_Occurred()) throw pybind11::error_already_set();
      return {nullptr, static_cast<T>(value)};
    } else {
      int overflow = 0;
      long long value = PyLong_AsLongLongAndOverflow(view.object, &overflow);
      bool fits = overflow == 0 && value >= std::numeric_limits<T>::min() &&
                  value <= std::numeric_limits<T>::max();
      if (!fits) fail(name, "an int32", std::string(pybind11::str(view.object)));
      return {nullptr, static_cast<T>(value)};
    }
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

  // Something that is no tensor, or a tensor without plain memory.
  static std::string describe_object(PyObject* object) {
    if (object == nullptr || object == Py_None) return "None";
    std::string out = Py_TYPE(object)->tp_name;
    for (const char* name : {"dtype", "layout", "device"}) {
      pybind11::object value = pybind11::getattr(object, name, pybind11::none());
      if (!value.is_none()) out += " " + torch_name(value);
    }
    return out;
  }

 private:
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

}  // namespace pybind11::detail
