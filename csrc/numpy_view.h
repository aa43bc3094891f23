// NumPy arrays as arguments, read as NumPy's C interface lays them out.
//
// nb::ndarray goes by DLPack, which takes 0.3 us an argument, and the buffer protocol allocates a
// description of each new array. Planning a layer takes some fifty arguments, with cold caches.

#pragma once

#include <nanobind/nanobind.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL oled_jax_numpy
#ifndef OLED_JAX_IMPORTS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace oled_jax {

template <class T>
struct NumpyType;
template <>
struct NumpyType<bool> {
  static constexpr int number = NPY_BOOL;
};
template <>
struct NumpyType<uint8_t> {
  static constexpr int number = NPY_UINT8;
};
template <>
struct NumpyType<int32_t> {
  static constexpr int number = NPY_INT32;
};
template <>
struct NumpyType<int64_t> {
  static constexpr int number = NPY_INT64;
};
template <>
struct NumpyType<float> {
  static constexpr int number = NPY_FLOAT32;
};
template <>
struct NumpyType<double> {
  static constexpr int number = NPY_FLOAT64;
};

// An array of `Rank` axes, borrowed for the time of a call. All axes but the first of several are
// contiguous. Where T is const, an array of another dtype or layout is converted to a copy.
template <class T, int Rank = 1>
class NumpyView {
 public:
  NumpyView() = default;
  NumpyView(const NumpyView&) = delete;
  NumpyView& operator=(const NumpyView&) = delete;

  // The same array, to be read; whoever has `other` keeps it.
  template <class U, class = std::enable_if_t<std::is_same_v<const U, T>>>
  NumpyView(const NumpyView<U, Rank>& other)  // NOLINT: a view converts as a pointer does
      : data_(const_cast<U*>(other.begin())), size_(other.size()), step_(other.step()) {
    for (int axis = 0; axis < Rank; ++axis) shape_[axis] = other.shape(axis);
  }
  // Memory that belongs to nobody in Python.
  static NumpyView over(T* data, const int64_t (&shape)[Rank]) { return NumpyView(data, shape); }

  // False if the object is no such array.
  bool borrow(PyObject* object) noexcept {
    if (!PyArray_Check(object)) return false;
    auto* array = reinterpret_cast<PyArrayObject*>(object);
    if (!fits(array)) return false;
    data_ = PyArray_DATA(array);
    size_ = 1;
    for (int axis = 0; axis < Rank; ++axis) {
      shape_[axis] = PyArray_DIM(array, axis);
      size_ *= shape_[axis];
    }
    step_ = PyArray_STRIDE(array, 0);
    return true;
  }
  // The same, and keeps the array. Where it is none, what was there stays.
  bool own(nanobind::object array) noexcept {
    if (!borrow(array.ptr())) return false;
    owner_ = std::move(array);
    return true;
  }

  int64_t shape(int axis) const { return shape_[axis]; }
  int64_t size() const { return size_; }
  // Of the first axis.
  T* row(int64_t index) const {
    return reinterpret_cast<T*>(static_cast<char*>(data_) + index * step_);
  }
  // Bytes, and elements, from one row to the next.
  int64_t step() const { return step_; }
  int64_t row_step() const { return step_ / static_cast<int64_t>(sizeof(T)); }
  T* begin() const { return static_cast<T*>(data_); }
  T* end() const {
    static_assert(Rank == 1);
    return begin() + size_;
  }
  T& operator[](int64_t index) const {
    static_assert(Rank == 1);
    return begin()[index];
  }

 private:
  NumpyView(T* data, const int64_t (&shape)[Rank])
      : data_(const_cast<std::remove_const_t<T>*>(data)), size_(1), step_(sizeof(T)) {
    for (int axis = 0; axis < Rank; ++axis) {
      shape_[axis] = shape[axis];
      size_ *= shape[axis];
      if (axis > 0) step_ *= shape[axis];
    }
  }

  static bool fits(PyArrayObject* array) noexcept {
    constexpr int needed = NPY_ARRAY_ALIGNED | (std::is_const_v<T> ? 0 : NPY_ARRAY_WRITEABLE);
    const int number = PyArray_TYPE(array);
    // Two numbers stand for int64 where `long` and `long long` are the same.
    const bool known = number == Type::number || (Type::number == NPY_INT64 && number == kOtherInt64);
    if (!known || PyArray_NDIM(array) != Rank || !PyArray_CHKFLAGS(array, needed) ||
        !PyArray_ISNOTSWAPPED(array)) {
      return false;
    }
    if (PyArray_SIZE(array) == 0) return true;  // whatever its strides
    npy_intp step = sizeof(T);
    for (int axis = Rank - 1; axis >= (Rank > 1 ? 1 : 0); --axis) {
      if (PyArray_DIM(array, axis) > 1 && PyArray_STRIDE(array, axis) != step) return false;
      step *= PyArray_DIM(array, axis);
    }
    return true;
  }

  using Type = NumpyType<std::remove_const_t<T>>;
  static_assert(sizeof(npy_long) == sizeof(int64_t));
  static constexpr int kOtherInt64 = NPY_INT64 == NPY_LONG ? NPY_LONGLONG : NPY_LONG;

  void* data_ = nullptr;
  int64_t shape_[Rank] = {};
  int64_t size_ = 0, step_ = 0;
  nanobind::object owner_;
};

// A new array of one axis.
template <class T>
class NewArray {
 public:
  explicit NewArray(int64_t size) {
    npy_intp shape[] = {static_cast<npy_intp>(size)};
    PyObject* array = PyArray_SimpleNew(1, shape, NumpyType<T>::number);
    if (array == nullptr) throw nanobind::python_error();
    object_ = nanobind::steal(array);
  }

  T* begin() const {
    return static_cast<T*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(object_.ptr())));
  }
  nanobind::object object() const { return object_; }

 private:
  nanobind::object object_;
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
      object array = module_::import_("numpy").attr("asarray")(source);
      object dtype = steal(reinterpret_cast<PyObject*>(
          PyArray_DescrFromType(oled_jax::NumpyType<std::remove_const_t<T>>::number)));
      // Same kind only: 1.5 is no expert's number.
      return value.own(array.attr("astype")(dtype, "C", "same_kind"));
    } catch (...) {
      PyErr_Clear();
      return false;
    }
  }
};

}  // namespace nanobind::detail
