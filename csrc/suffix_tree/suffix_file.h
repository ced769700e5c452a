// SPDX-License-Identifier: Apache-2.0
// The file to which a suffix cache is saved: a header with a version, then sections of plain
// arrays, each with a checksum. It is written under another name and renamed when it is complete.
// Only its owner may read it, because it has texts of the server's clients.
//
//   header     magic, version, byte order
//   section*   size and checksum, then the bytes
//   end        number of sections, and a checksum over the sections' checksums
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
  ~FileWriter();  // without `finish`, no file remains
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
  explicit FileReader(const std::string& path);  // rejects other files and later versions
  ~FileReader();
  FileReader(const FileReader&) = delete;
  FileReader& operator=(const FileReader&) = delete;

  uint32_t version() const;  // version of the contents of the sections, 1 or 2
  // Returns the size of the next section. It is never larger than the rest of the file, so that the
  // caller may allocate it.
  size_t section_bytes() const;
  // Reads the next section. It must have num_bytes bytes, and its checksum must be correct.
  void section(void* data, size_t num_bytes);
  void finish();  // checks that no section is left

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace specops
