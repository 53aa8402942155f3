// The fields of an operation that Python hands over.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "program/program.h"
#include "program/rank_memory.h"

namespace retain {

using Address = uintptr_t;
using WeightArgs = std::tuple<Address, int, int, int>;  // data, outputs, inputs, format

inline PackedWeight packed_weight(const WeightArgs& w) {
  const auto [data, out, in, format] = w;
  return {reinterpret_cast<char*>(data), out, in, WeightFormat(format)};
}

// One operation as Python hands it over: numbers of buffers, addresses of tensors (0: none), sizes and constants.
// Throws std::invalid_argument for a field that is missing or of another type.
class Record {
 public:
  explicit Record(nanobind::dict fields) : fields_(std::move(fields)) {}

  template <class T>
  T as(const char* name) const {
    if (!fields_.contains(name)) throw std::invalid_argument(std::string("an operation has no field ") + name);
    try {
      return nanobind::cast<T>(fields_[name]);
    } catch (const std::bad_cast&) {
      throw std::invalid_argument(std::string("an operation has another type of field ") + name);
    }
  }
  int get(const char* name) const { return as<int>(name); }
  float real(const char* name) const { return as<float>(name); }
  bool flag(const char* name) const { return as<bool>(name); }
  const float* numbers(const char* name) const { return reinterpret_cast<float*>(as<Address>(name)); }
  const char* bytes(const char* name) const { return reinterpret_cast<char*>(as<Address>(name)); }
  const int32_t* integers(const char* name) const { return reinterpret_cast<int32_t*>(as<Address>(name)); }
  PackedWeight weight(const char* name) const { return packed_weight(as<WeightArgs>(name)); }
  HeadColumns columns(const char* name) const {
    const auto [H, width, stride, first] = as<std::tuple<int, int, int, int>>(name);
    return {H, width, stride, first};
  }

 private:
  nanobind::dict fields_;
};

// Appends an operation. Raises std::invalid_argument for a name that no operation has.
void add_operation(Program&, const std::string& name, const Record&);

}  // namespace retain
