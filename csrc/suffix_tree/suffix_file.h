// SPDX-License-Identifier: Apache-2.0
// The single file that a suffix cache is saved to: a versioned header, then sections of plain
// arrays, each with a checksum. It is written under another name and moved into place when
// complete. Only its owner may read it, because it holds texts of the server's clients.
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

// Both classes throw std::runtime_error with a message that names the file, or std::system_error if
// a system call fails.
class FileWriter {
 public:
  explicit FileWriter(const std::string& path);
  ~FileWriter();  // without `finish`, no file is left
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
  explicit FileReader(const std::string& path);  // refuses foreign files and later versions
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  uint32_t version() const;  // version of the sections' contents, 1 or 2
  // Returns the bytes of the next section; never more than the rest of the file, so that the caller
  // may allocate them.
  size_t section_bytes() const;
  // Reads the next section, which must be num_bytes long and unchanged since it was written.
  void section(void* data, size_t num_bytes);
  void finish();  // requires that nothing is left

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace specops
