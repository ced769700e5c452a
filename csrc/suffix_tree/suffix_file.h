// SPDX-License-Identifier: Apache-2.0
// The one file that a suffix cache is saved to: a versioned header, then sections of plain arrays, each
// with a checksum. Written under another name and moved into place when it is complete. Only its owner
// may read it: it holds texts of the server's clients.
//
//   header     magic, version, byte order
//   section*   its size and checksum, then its bytes
//   end        as many sections, and a checksum of theirs
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace specops {

// Both throw std::runtime_error with a sentence that names the file; std::system_error where the system
// refuses.
class FileWriter {
 public:
  explicit FileWriter(const std::string& path);
  ~FileWriter();  // without `finish` nothing is left
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void section(const void* data, size_t num_bytes);
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

class FileReader {
 public:
  explicit FileReader(const std::string& path);  // foreign files, later versions: refused
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  uint32_t version() const;  // of what the sections hold, 1 or 2
  // Of the next section; never more than the file has left, so that it may be allocated.
  size_t section_bytes() const;
  // Reads the next section, which must be num_bytes long and as it was written.
  void section(void* data, size_t num_bytes);
  void finish();  // nothing may be left

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace specops
