#include "messages.h"

#include <algorithm>
#include <cstring>
#include <set>

namespace onnxpar {
namespace {

template <typename Number>
void Append(std::string* bytes, Number number) {
  bytes->append(reinterpret_cast<const char*>(&number), sizeof(number));
}

}  // namespace

Writer::Writer(Kind kind) : bytes_(1, static_cast<char>(kind)) {}

void Writer::Number(uint64_t value) { Append(&bytes_, value); }

void Writer::Text(const std::string& text) { Bytes(text.substr(0, kMaxText)); }

void Writer::Bytes(const std::string& bytes) {
  Number(bytes.size());
  bytes_ += bytes;
}

void Writer::Group(const std::vector<int>& ranks) {
  Number(ranks.size());
  for (int rank : ranks) Number(static_cast<uint64_t>(rank));
}

void Writer::PerMember(const std::vector<int64_t>& values, const std::vector<int>&) {
  Number(values.size());
  for (int64_t value : values) Number(static_cast<uint64_t>(value));
}

void Writer::GroupRuns(const Runs& runs) {
  for (const auto& [id, count] : runs) {
    Group(id.first);
    Stream(id.second);
    Number(count);
  }
}

std::string Writer::Frame() const {
  std::string frame;
  Append(&frame, static_cast<uint32_t>(bytes_.size()));
  return frame + bytes_;
}

void Reader::Number(uint64_t& value) {
  if (bytes_.size() - position_ < sizeof(value)) throw ProtocolError("it is too short");
  std::memcpy(&value, bytes_.data() + position_, sizeof(value));
  position_ += sizeof(value);
}

void Reader::Flag(bool& value) {
  uint64_t number = 0;
  Number(number);
  if (number > 1) throw ProtocolError(std::to_string(number) + " is neither yes nor no");
  value = number == 1;
}

void Reader::Wait(std::chrono::milliseconds& value) {
  uint64_t number = 0;
  Number(number);
  if (number > static_cast<uint64_t>(kMaxWait.count())) {
    throw ProtocolError("nobody waits for " + std::to_string(number) + " ms");
  }
  value = std::chrono::milliseconds(number);
}

/// Reads the number of items that follow, of at least `bytes_each` bytes each. Throws if the rest
/// of the frame is too short for so many.
uint64_t Reader::Count(size_t bytes_each) {
  uint64_t count = 0;
  Number(count);
  if (count > (bytes_.size() - position_) / bytes_each) {
    throw ProtocolError("it ends before what it says it has");
  }
  return count;
}

void Reader::Bytes(std::string& bytes, size_t longest) {
  const uint64_t size = Count(1);
  if (size > longest) throw ProtocolError("a text of " + std::to_string(size) + " bytes");
  bytes = bytes_.substr(position_, size);
  position_ += size;
}

void Reader::Group(std::vector<int>& ranks) {
  ranks.clear();
  for (uint64_t left = Count(sizeof(uint64_t)); left > 0; --left) {
    uint64_t rank = 0;
    Number(rank);
    if (rank >= static_cast<uint64_t>(scope_.size)) {
      throw ProtocolError("rank " + std::to_string(rank) + " is not in a world of " +
                          std::to_string(scope_.size));
    }
    ranks.push_back(static_cast<int>(rank));
  }
  if (std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size()) {
    throw ProtocolError("a group that has a rank twice");
  }
  if (std::find(ranks.begin(), ranks.end(), scope_.rank) == ranks.end()) {
    throw ProtocolError("a group without rank " + std::to_string(scope_.rank));
  }
}

void Reader::Stream(uint64_t& stream) {
  Number(stream);
  if (stream >= kMaxStreams) {
    throw ProtocolError("a rank has no stream " + std::to_string(stream));
  }
}

void Reader::PerMember(std::vector<int64_t>& values, const std::vector<int>& ranks) {
  values.clear();
  for (uint64_t left = Count(sizeof(uint64_t)); left > 0; --left) {
    uint64_t value = 0;
    Number(value);
    values.push_back(static_cast<int64_t>(value));
  }
  if (!values.empty() && values.size() != ranks.size()) {
    throw ProtocolError(std::to_string(values.size()) + " numbers for " +
                        std::to_string(ranks.size()) + " ranks");
  }
}

void Reader::GroupRuns(Runs& runs) {
  runs.clear();
  while (position_ < bytes_.size()) {
    GroupId id;
    Group(id.first);
    Stream(id.second);
    Number(runs[id]);
  }
}

void Reader::End() const {
  if (position_ != bytes_.size()) throw ProtocolError("it is too long");
}

}  // namespace onnxpar
