// NumPy arrays as arguments, by the buffer protocol.
//
// nb::ndarray goes by DLPack, which takes 0.3 us an argument, and 0.5 us where the array is
// read-only. The buffer protocol takes 0.1 us, and planning a layer takes some fifty arguments.

#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace oled_jax {

template <class T>
struct NumpyType;
template <>
struct NumpyType<bool> {
  static constexpr const char* name = "bool";
  static constexpr const char* formats = "?";
};
template <>
struct NumpyType<uint8_t> {
  static constexpr const char* name = "uint8";
  static constexpr const char* formats = "B";
};
template <>
struct NumpyType<int32_t> {
  static constexpr const char* name = "int32";
  static constexpr const char* formats = "il";  // l is of 4 or 8 bytes: the item size decides
};
template <>
struct NumpyType<int64_t> {
  static constexpr const char* name = "int64";
  static constexpr const char* formats = "lq";
};
template <>
struct NumpyType<float> {
  static constexpr const char* name = "float32";
  static constexpr const char* formats = "f";
};
template <>
struct NumpyType<double> {
  static constexpr const char* name = "float64";
  static constexpr const char* formats = "d";
};

// An array of `Rank` axes, borrowed for the time of a call. All axes but the first of several are
// contiguous. Where T is const, an array of another dtype or layout is converted to a copy.
template <class T, int Rank = 1>
class NumpyView {
 public:
  NumpyView() { buffer_.obj = nullptr; }
  ~NumpyView() {
    if (buffer_.obj != nullptr) PyBuffer_Release(&buffer_);
  }
  NumpyView(const NumpyView&) = delete;
  NumpyView& operator=(const NumpyView&) = delete;

  // False, and no Python error is set, if the object is no such array.
  bool borrow(PyObject* object) noexcept {
    const int writable = std::is_const_v<T> ? 0 : PyBUF_WRITABLE;
    if (PyObject_GetBuffer(object, &buffer_, PyBUF_STRIDES | PyBUF_FORMAT | writable) != 0) {
      PyErr_Clear();
      buffer_.obj = nullptr;
      return false;
    }
    if (fits()) return true;
    PyBuffer_Release(&buffer_);
    return false;
  }

  int64_t shape(int axis) const { return buffer_.shape[axis]; }
  int64_t size() const { return buffer_.len / static_cast<int64_t>(sizeof(T)); }
  // Of the first axis.
  T* row(int64_t index) const {
    return reinterpret_cast<T*>(static_cast<char*>(buffer_.buf) + index * buffer_.strides[0]);
  }
  // Elements from one row to the next.
  int64_t row_step() const { return buffer_.strides[0] / static_cast<int64_t>(sizeof(T)); }
  T* begin() const { return static_cast<T*>(buffer_.buf); }
  T* end() const {
    static_assert(Rank == 1);
    return begin() + size();
  }
  T& operator[](int64_t index) const {
    static_assert(Rank == 1);
    return begin()[index];
  }

 private:
  bool fits() const noexcept {
    using Type = NumpyType<std::remove_const_t<T>>;
    if (buffer_.ndim != Rank || buffer_.itemsize != sizeof(T)) return false;
    bool known = false;
    for (const char* format = Type::formats; *format != 0; ++format) {
      known = known || (buffer_.format[0] == *format && buffer_.format[1] == 0);
    }
    Py_ssize_t step = sizeof(T);
    for (int axis = Rank - 1; axis >= (Rank > 1 ? 1 : 0); --axis) {
      if (buffer_.shape[axis] > 1 && buffer_.strides[axis] != step) return false;
      step *= buffer_.shape[axis];
    }
    return known;
  }

  Py_buffer buffer_;
};

}  // namespace oled_jax

namespace nanobind::detail {

template <class T, int Rank>
struct type_caster<oled_jax::NumpyView<T, Rank>> {
  using View = oled_jax::NumpyView<T, Rank>;
  NB_TYPE_CASTER(View, const_name("numpy.ndarray"))

  bool from_python(handle source, uint8_t flags, cleanup_list*) noexcept {
    if (value.borrow(source.ptr())) return true;
    if (!std::is_const_v<T> || (flags & static_cast<uint8_t>(cast_flags::convert)) == 0) {
      return false;
    }
    try {
      const char* dtype = oled_jax::NumpyType<std::remove_const_t<T>>::name;
      object array = module_::import_("numpy").attr("asarray")(source);
      // Same kind only: 1.5 is no expert's number.
      object copy = array.attr("astype")(dtype, "C", "same_kind");
      return value.borrow(copy.ptr());
    } catch (...) {
      PyErr_Clear();
      return false;
    }
  }
};

}  // namespace nanobind::detail
