// SPDX-License-Identifier: Apache-2.0
// All threads read a section and compute its checksum in pieces, each piece while it is in cache;
// the checksums of the pieces are combined in order. They detect damage by disks, copies and
// interrupted programs, but do not protect against attackers.
#include "suffix_tree/suffix_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <vector>

#include "common/parallel.h"

namespace specops {
namespace {

constexpr char kMagic[16] = "specops suffix";
constexpr uint32_t kVersion = 2;
constexpr uint32_t kByteOrder = 0x01020304;
constexpr size_t kPiece = size_t{1} << 20;

struct Header {
  char magic[16];
  uint32_t version;
  uint32_t byte_order;
};

// Header before the bytes of each section. A header with size kEnd follows the last section.
struct SectionHeader {
  uint64_t num_bytes;
  uint64_t checksum;  // of the section's index, size and bytes
};
constexpr uint64_t kEnd = ~uint64_t{0};

// Mixes a and b so that every input bit affects every output bit.
inline uint64_t mix(uint64_t a, uint64_t b) {
  unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

constexpr uint64_t kPrimes[4] = {
    0x9e3779b97f4a7c15u, 0xbf58476d1ce4e5b9u, 0x94d049bb133111ebu, 0xd6e8feb86659fd93u};

inline uint64_t load64(const unsigned char* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// Computes a checksum with four lanes of multiplications, as fast as memory is read.
uint64_t checksum(const void* data, size_t num_bytes, uint64_t seed) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint64_t lanes[4];
  for (int i = 0; i < 4; ++i) lanes[i] = seed ^ kPrimes[i];
  size_t at = 0;
  for (; at + 64 <= num_bytes; at += 64) {
    for (int i = 0; i < 4; ++i) {
      uint64_t low = load64(bytes + at + 16 * i);
      uint64_t high = load64(bytes + at + 16 * i + 8);
      // Use the lane in one factor only, so that a factor of zero loses only one piece of it.
      lanes[i] = mix(low ^ kPrimes[i], high ^ lanes[i]) + (lanes[i] << 1 | lanes[i] >> 63) + low;
    }
  }
  unsigned char last[64] = {};
  if (at < num_bytes) std::memcpy(last, bytes + at, num_bytes - at);
  for (int i = 0; i < 4; ++i) {
    uint64_t low = load64(last + 16 * i);
    uint64_t high = load64(last + 16 * i + 8);
    lanes[i] = mix(low ^ kPrimes[i], high ^ lanes[i]) + (lanes[i] << 1 | lanes[i] >> 63) + low;
  }
  uint64_t sum = num_bytes * kPrimes[0];
  for (int i = 0; i < 4; ++i) sum = mix(sum ^ lanes[i], kPrimes[3 - i]) + sum;
  return sum;
}

uint64_t begin_checksum(uint64_t section, uint64_t num_bytes) {
  return mix(section + kPrimes[1], num_bytes ^ kPrimes[2]);
}

uint64_t add_piece(uint64_t sum, uint64_t piece) { return mix(sum ^ kPrimes[0], piece) + sum; }

size_t num_pieces(size_t num_bytes) { return (num_bytes + kPiece - 1) / kPiece; }

size_t piece_bytes(size_t num_bytes, size_t piece) {
  size_t left = num_bytes - piece * kPiece;
  return left < kPiece ? left : kPiece;
}

[[noreturn]] void refuse(const std::string& path, const char* what) {
  throw std::runtime_error("the file '" + path + "' " + what);
}

[[noreturn]] void refused(int error, const std::string& path) {
  throw std::system_error(error, std::generic_category(), path);
}

}  // namespace

struct FileWriter::State {
  std::string path;
  std::string unfinished;  // temporary name until `finish`
  int fd = -1;
  uint64_t sections = 0;
  uint64_t sums = 0;

  void write_all(const void* data, size_t num_bytes) {
    const char* from = static_cast<const char*>(data);
    while (num_bytes > 0) {
      ssize_t written = ::write(fd, from, num_bytes);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) refused(errno, path);
      from += written;
      num_bytes -= static_cast<size_t>(written);
    }
  }
};

FileWriter::FileWriter(const std::string& path) : state_(std::make_unique<State>()) {
  static std::atomic<uint64_t> count{0};
  state_->path = path;
  state_->unfinished =
      path + ".unfinished-" + std::to_string(::getpid()) + "-" + std::to_string(count.fetch_add(1));
  state_->fd = ::open(state_->unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (state_->fd < 0) refused(errno, path);
  Header header{.magic = {}, .version = kVersion, .byte_order = kByteOrder};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  try {
    state_->write_all(&header, sizeof(header));
  } catch (...) {
    ::close(state_->fd);
    ::unlink(state_->unfinished.c_str());
    throw;
  }
}

FileWriter::~FileWriter() {
  if (state_->fd < 0) return;
  ::close(state_->fd);
  ::unlink(state_->unfinished.c_str());
}

void FileWriter::section(const void* data, size_t num_bytes) {
  std::vector<uint64_t> pieces(num_pieces(num_bytes));
  parallel_for(static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (size_t i = begin; i < static_cast<size_t>(end); ++i) {
      const char* from = static_cast<const char*>(data) + i * kPiece;
      pieces[i] = checksum(from, piece_bytes(num_bytes, i), i);
    }
  });
  uint64_t sum = begin_checksum(state_->sections, num_bytes);
  for (uint64_t piece : pieces) sum = add_piece(sum, piece);
  SectionHeader header{.num_bytes = num_bytes, .checksum = sum};
  state_->write_all(&header, sizeof(header));
  state_->write_all(data, num_bytes);
  state_->sections += 1;
  state_->sums = add_piece(state_->sums, sum);
}

void FileWriter::finish() {
  State& state = *state_;
  SectionHeader end{.num_bytes = kEnd, .checksum = add_piece(state.sums, state.sections)};
  state.write_all(&end, sizeof(end));
  // Sync the bytes before the file is renamed, so that after a power failure either the old or the
  // new file exists.
  if (::fsync(state.fd) != 0) refused(errno, state.path);
  if (::rename(state.unfinished.c_str(), state.path.c_str()) != 0) refused(errno, state.path);
  ::close(state.fd);
  state.fd = -1;
}

struct FileReader::State {
  std::string path;
  int fd = -1;
  uint32_t version = 0;
  uint64_t size = 0;
  uint64_t at = 0;
  uint64_t sections = 0;
  uint64_t sums = 0;
  SectionHeader next{};

  ~State() {
    if (fd >= 0) ::close(fd);
  }

  // Reads bytes from `offset` on. Returns 0 if all were read, -1 at the end of the file, else an
  // errno.
  int read_at(uint64_t offset, void* data, size_t num_bytes) const {
    char* to = static_cast<char*>(data);
    while (num_bytes > 0) {
      ssize_t got = ::pread(fd, to, num_bytes, static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return got < 0 ? errno : -1;
      to += got;
      offset += static_cast<uint64_t>(got);
      num_bytes -= static_cast<size_t>(got);
    }
    return 0;
  }

  void judge(int error) const {
    if (error < 0) refuse(path, "is cut short");
    if (error > 0) refused(error, path);
  }

  void read_section_header() {
    judge(read_at(at, &next, sizeof(next)));
    at += sizeof(next);
    if (next.num_bytes != kEnd && next.num_bytes > size - at) refuse(path, "is cut short");
  }
};

FileReader::FileReader(const std::string& path) : state_(std::make_unique<State>()) {
  State& state = *state_;
  state.path = path;
  state.fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat facts;
  if (state.fd < 0 || ::fstat(state.fd, &facts) != 0) refused(errno, path);
  if (S_ISDIR(facts.st_mode)) refused(EISDIR, path);
  if (!S_ISREG(facts.st_mode)) refuse(path, "is no regular file");
  state.size = static_cast<uint64_t>(facts.st_size);
  Header header{};
  int error = state.read_at(0, &header, sizeof(header));
  if (error > 0) refused(error, path);
  if (error < 0 || std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
    refuse(path, "was not written by SuffixCache.save");
  }
  if (header.byte_order != kByteOrder) refuse(path, "was written by a machine of other byte order");
  state.version = header.version;
  if (header.version < 1 || header.version > kVersion) {
    std::string what = "has format " + std::to_string(header.version) + ", and format " +
                       std::to_string(kVersion) + " is the latest that this version reads";
    refuse(path, what.c_str());
  }
  state.at = sizeof(header);
  state.read_section_header();
}

FileReader::~FileReader() = default;

uint32_t FileReader::version() const { return state_->version; }

size_t FileReader::section_bytes() const {
  if (state_->next.num_bytes == kEnd) refuse(state_->path, "is damaged: a section is missing");
  return state_->next.num_bytes;
}

void FileReader::section(void* data, size_t num_bytes) {
  State& state = *state_;
  if (section_bytes() != num_bytes) refuse(state.path, "is damaged: a section has another size");
  std::vector<uint64_t> pieces(num_pieces(num_bytes));
  std::atomic<int> error{0};
  parallel_for(static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end) {
    for (size_t i = begin; i < static_cast<size_t>(end); ++i) {
      char* to = static_cast<char*>(data) + i * kPiece;
      size_t count = piece_bytes(num_bytes, i);
      int failed = state.read_at(state.at + i * kPiece, to, count);
      if (failed != 0) error.store(failed, std::memory_order_relaxed);
      pieces[i] = checksum(to, count, i);
    }
  });
  state.judge(error.load());
  uint64_t sum = begin_checksum(state.sections, num_bytes);
  for (uint64_t piece : pieces) sum = add_piece(sum, piece);
  if (sum != state.next.checksum) refuse(state.path, "is damaged: a checksum does not hold");
  state.at += num_bytes;
  state.sections += 1;
  state.sums = add_piece(state.sums, sum);
  state.read_section_header();
}

void FileReader::finish() {
  const State& state = *state_;
  if (state.next.num_bytes != kEnd ||
      state.next.checksum != add_piece(state.sums, state.sections)) {
    refuse(state.path, "is damaged: it does not end where it should");
  }
  if (state.at != state.size) refuse(state.path, "is damaged: something follows its end");
}

}  // namespace specops
