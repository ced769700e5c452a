// SPDX-License-Identifier: Apache-2.0
// Backend of ggml with two devices. The first computes: its tensors are the CPU backend's. The second
// only has the buffer type of packed weights, because llama.cpp puts weights into the default buffer
// type of an accelerator, and the results of its operations as well.
#include <atomic>
#include <cstring>
#include <exception>
#include <new>

#include "common/isa.h"
#include "common/parallel.h"
#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "llamacpp/formats.h"
#include "llamacpp/ops.h"

namespace specops {
namespace {

ggml_backend_reg* registry();
ggml_backend_dev_t device(size_t index);
ggml_backend_buffer_type_t packed_buffer_type();

bool is_packed_buffer(ggml_backend_buffer_t buffer) {
  return buffer != nullptr && buffer->buft == packed_buffer_type();
}

// Returns whether a tensor has a packed layout.
bool is_packed(const ggml_tensor* tensor) {
  const ggml_tensor* owner = tensor->view_src == nullptr ? tensor : tensor->view_src;
  return is_packed_buffer(owner->buffer);
}

// Buffers of packed weights.

constexpr size_t kAlignment = 64;

void free_buffer(ggml_backend_buffer_t buffer) {
  ::operator delete(buffer->context, std::align_val_t{kAlignment});
}

void* buffer_base(ggml_backend_buffer_t buffer) { return buffer->context; }

void set_tensor(
    ggml_backend_buffer_t, ggml_tensor* tensor, const void* data, size_t offset, size_t size) {
  size_t block = ggml_type_size(tensor->type);
  if (offset % block != 0 || size % block != 0) {
    GGML_ABORT(
        "specops: data of %s must consist of whole blocks of %zu bytes, got %zu bytes at %zu",
        tensor->name,
        block,
        size,
        offset);
  }
  pack(tensor, data, offset, size);
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor* tensor, void*, size_t, size_t) {
  GGML_ABORT("specops: %s is packed, and cannot be read", tensor->name);
}

void clear_buffer(ggml_backend_buffer_t buffer, uint8_t value) {
  std::memset(buffer->context, value, buffer->size);
}

constexpr ggml_backend_buffer_i kBuffer = {
    .free_buffer = free_buffer,
    .get_base = buffer_base,
    .init_tensor = nullptr,
    .memset_tensor = nullptr,
    .set_tensor = set_tensor,
    .get_tensor = get_tensor,
    .set_tensor_2d = nullptr,
    .get_tensor_2d = nullptr,
    .cpy_tensor = nullptr,
    .clear = clear_buffer,
    .reset = nullptr,
};

const char* buffer_type_name(ggml_backend_buffer_type_t) { return "specops"; }

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
  void* memory = ::operator new(size, std::align_val_t{kAlignment}, std::nothrow);
  if (memory == nullptr) {
    GGML_LOG_ERROR("specops: no memory for %zu bytes of weights\n", size);
    return nullptr;
  }
  return ggml_backend_buffer_init(type, kBuffer, memory, size);
}

size_t alignment(ggml_backend_buffer_type_t) { return kAlignment; }

size_t alloc_size(ggml_backend_buffer_type_t, const ggml_tensor* tensor) {
  return is_packed_type(tensor->type) ? packed_bytes(tensor) : ggml_nbytes(tensor);
}

ggml_backend_buffer_type_t packed_buffer_type() {
  static ggml_backend_buffer_type type = {
      .iface =
          {
              .get_name = buffer_type_name,
              .alloc_buffer = alloc_buffer,
              .get_alignment = alignment,
              .get_max_size = nullptr,
              .get_alloc_size = alloc_size,
              .is_host = nullptr,
          },
      .device = device(1),
      .context = nullptr,
  };
  return &type;
}

// Operations.

// Computes an operation that supports_op accepts.
void compute(ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_MUL_MAT:
      return mul_mat(node, is_packed(node->src[0]));
    case GGML_OP_MUL_MAT_ID:
      return mul_mat_id(node, is_packed(node->src[0]));
    case GGML_OP_SOFT_MAX:
      return soft_max(node);
    case GGML_OP_FLASH_ATTN_EXT:
      return flash_attn_ext(node);
    default:
      return;  // views
  }
}

struct Context {
  int num_threads = GGML_DEFAULT_N_THREADS;
};

const char* backend_name(ggml_backend_t) { return "specops"; }

void free_backend(ggml_backend_t backend) {
  delete static_cast<Context*>(backend->context);
  delete backend;
}

ggml_status compute_graph(ggml_backend_t backend, ggml_cgraph* graph) {
  set_num_threads(static_cast<Context*>(backend->context)->num_threads);
  try {
    for (int i = 0; i < graph->n_nodes; ++i) {
      ggml_tensor* node = graph->nodes[i];
      if ((node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0 && !ggml_is_empty(node)) compute(node);
    }
  } catch (const std::exception& error) {
    GGML_LOG_ERROR("specops: %s\n", error.what());
    return GGML_STATUS_FAILED;
  }
  return GGML_STATUS_SUCCESS;
}

void set_backend_threads(ggml_backend_t backend, int num_threads) {
  static_cast<Context*>(backend->context)->num_threads = num_threads;
}

ggml_backend_t init_backend(ggml_backend_dev_t device, const char*) {
  static ggml_guid guid = {0x73,
                           0x70,
                           0x65,
                           0x63,
                           0x6f,
                           0x70,
                           0x73,
                           0x2d,
                           0x67,
                           0x67,
                           0x6d,
                           0x6c,
                           0x2d,
                           0x30,
                           0x30,
                           0x31};
  static constexpr ggml_backend_i kBackend = {
      .get_name = backend_name,
      .free = free_backend,
      .set_tensor_async = nullptr,
      .get_tensor_async = nullptr,
      .set_tensor_2d_async = nullptr,
      .get_tensor_2d_async = nullptr,
      .cpy_tensor_async = nullptr,
      .synchronize = nullptr,
      .graph_plan_create = nullptr,
      .graph_plan_free = nullptr,
      .graph_plan_update = nullptr,
      .graph_plan_compute = nullptr,
      .graph_compute = compute_graph,
      .event_record = nullptr,
      .event_wait = nullptr,
      .graph_optimize = nullptr,
  };
  return new ggml_backend{
      .guid = &guid, .iface = kBackend, .device = device, .context = new Context};
}

// Devices.

bool is_weights(ggml_backend_dev_t dev) { return dev == device(1); }

const char* device_name(ggml_backend_dev_t dev) {
  return is_weights(dev) ? "specops-weights" : "specops";
}

const char* device_description(ggml_backend_dev_t dev) {
  return is_weights(dev) ? "weights packed for specops" : "products and attention of specops";
}

void device_memory(ggml_backend_dev_t, size_t* free, size_t* total) { *free = *total = 0; }

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) {
  return GGML_BACKEND_DEVICE_TYPE_ACCEL;
}

void device_props(ggml_backend_dev_t dev, ggml_backend_dev_props* props) {
  props->name = device_name(dev);
  props->description = device_description(dev);
  props->type = device_type(dev);
  device_memory(dev, &props->memory_free, &props->memory_total);
  props->caps = {};
  props->caps.buffer_from_host_ptr = props->caps.mmap_support = !is_weights(dev);
}

ggml_backend_buffer_type_t device_buffer_type(ggml_backend_dev_t dev) {
  return is_weights(dev) ? packed_buffer_type() : ggml_backend_cpu_buffer_type();
}

ggml_backend_buffer_t buffer_from_host_ptr(ggml_backend_dev_t, void* data, size_t size, size_t) {
  return ggml_backend_cpu_buffer_from_ptr(data, size);
}

// Returns whether ggml's CPU backend computes a row of an operation in the same way among any other
// rows (tests/test_llamacpp.py), or only moves data.
bool is_exact_in_ggml(ggml_op op) {
  switch (op) {
    case GGML_OP_ADD:
    case GGML_OP_ADD_ID:
    case GGML_OP_ARGSORT:
    case GGML_OP_CLAMP:
    case GGML_OP_CONCAT:
    case GGML_OP_CONT:
    case GGML_OP_CPY:
    case GGML_OP_DIV:
    case GGML_OP_DUP:
    case GGML_OP_GET_ROWS:
    case GGML_OP_GLU:
    case GGML_OP_L2_NORM:
    case GGML_OP_MUL:
    case GGML_OP_NORM:
    case GGML_OP_REPEAT:
    case GGML_OP_RMS_NORM:
    case GGML_OP_ROPE:
    case GGML_OP_SCALE:
    case GGML_OP_SET_ROWS:
    case GGML_OP_SQR:
    case GGML_OP_SQRT:
    case GGML_OP_SUB:
    case GGML_OP_SUM_ROWS:
    case GGML_OP_UNARY:
      return true;
    default:
      return false;
  }
}

// Logs once that ggml computes an operation whose rows may depend on each other.
void warn_inexact(const ggml_tensor* op) {
  static std::atomic<bool> warned[GGML_OP_COUNT];
  if (is_exact_in_ggml(op->op) || warned[op->op].exchange(true)) return;
  GGML_LOG_WARN(
      "specops: ggml computes %s of %s, whose rows may depend on each other: speculation is not "
      "lossless\n",
      ggml_op_desc(op),
      op->src[0] == nullptr ? "none" : ggml_type_name(op->src[0]->type));
}

bool is_supported(ggml_backend_dev_t dev, const ggml_tensor* op) {
  for (const ggml_tensor* src : op->src) {
    if (src != nullptr && src != op->src[0] && is_packed(src)) return false;
  }
  bool packed = op->src[0] != nullptr && is_packed(op->src[0]);
  if (is_weights(dev) && !packed) return op->op == GGML_OP_NONE;
  switch (op->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE:
      return true;
    case GGML_OP_MUL_MAT:
      return supports_mul_mat(op, packed);
    case GGML_OP_MUL_MAT_ID:
      return supports_mul_mat_id(op, packed);
    case GGML_OP_SOFT_MAX:
      return supports_soft_max(op);
    case GGML_OP_FLASH_ATTN_EXT:
      return supports_flash_attn_ext(op);
    default:
      return false;
  }
}

bool supports_op(ggml_backend_dev_t dev, const ggml_tensor* op) {
  bool supported = is_supported(dev, op);
  if (!supported && !is_weights(dev)) warn_inexact(op);
  return supported;
}

bool supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
  return type == packed_buffer_type() || ggml_backend_buft_is_host(type);
}

ggml_backend_dev_t device(size_t index) {
  static const ggml_backend_device_i kDevice = {
      .get_name = device_name,
      .get_description = device_description,
      .get_memory = device_memory,
      .get_type = device_type,
      .get_props = device_props,
      .init_backend = init_backend,
      .get_buffer_type = device_buffer_type,
      .get_host_buffer_type = nullptr,
      .buffer_from_host_ptr = buffer_from_host_ptr,
      .supports_op = supports_op,
      .supports_buft = supports_buft,
      .offload_op = nullptr,
      .event_new = nullptr,
      .event_free = nullptr,
      .event_synchronize = nullptr,
  };
  static ggml_backend_device devices[] = {
      {.iface = kDevice, .reg = registry(), .context = nullptr},
      {.iface = kDevice, .reg = registry(), .context = nullptr},
  };
  return &devices[index];
}

// Registration.

const char* registry_name(ggml_backend_reg_t) { return "specops"; }
size_t device_count(ggml_backend_reg_t) { return 2; }
ggml_backend_dev_t get_device(ggml_backend_reg_t, size_t index) { return device(index); }

void* proc_address(ggml_backend_reg_t, const char* name) {
  if (std::strcmp(name, "ggml_backend_set_n_threads") != 0) return nullptr;
  return reinterpret_cast<void*>(set_backend_threads);
}

ggml_backend_reg* registry() {
  static ggml_backend_reg reg = {
      .api_version = GGML_BACKEND_API_VERSION,
      .iface =
          {
              .get_name = registry_name,
              .get_device_count = device_count,
              .get_device = get_device,
              .get_proc_address = proc_address,
          },
      .context = nullptr,
  };
  return &reg;
}

}  // namespace
}  // namespace specops

// Version of ggml that the library was built for.
extern "C" __attribute__((visibility("default"))) const char* specops_ggml_version() {
  return SPECOPS_GGML_VERSION;
}

// Entry point: ggml calls this function after it has loaded the library.
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
  if (std::strcmp(ggml_version(), SPECOPS_GGML_VERSION) != 0) {
    GGML_LOG_ERROR(
        "specops: built for ggml %s, but this is ggml %s: not used, speculation is not lossless\n",
        SPECOPS_GGML_VERSION,
        ggml_version());
    return nullptr;
  }
  try {
    GGML_LOG_INFO("specops: matrix products and attention on %s\n",
                  specops::isa_name(specops::active_isa()));
  } catch (const std::exception& error) {  // SPECOPS_ISA has no valid value
    GGML_LOG_ERROR("specops: %s: not used, speculation is not lossless\n", error.what());
    return nullptr;
  }
  return specops::registry();
}
