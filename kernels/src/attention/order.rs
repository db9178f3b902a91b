//! Order of heads and positions in memory.

use burn::backend::flex::{FlexTensor, Layout};
use burn::tensor::{Bytes, DType, Shape};

use crate::new_values::{Blank, NewValues};

/// Order in memory of tensors of shape `[batch, heads, len, depth]`.
///
/// Linear layers write the heads of a position side by side, and read them so. A view with swapped
/// dimensions needs no copy then.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Order {
    /// All positions of a head are adjacent.
    Heads,
    /// All heads of a position are adjacent.
    Positions,
}

impl Order {
    /// Returns the order of a tensor of four dimensions. With one head or position, both orders are
    /// the same.
    pub(super) fn of(tensor: &FlexTensor) -> Self {
        let strides = tensor.layout().strides();
        if strides[1].abs() < strides[2].abs() { Self::Positions } else { Self::Heads }
    }

    /// Divides a new tensor into the rows of each head, in the order of batch and heads.
    ///
    /// # Shapes
    ///
    /// `values` `[batch * heads * len * depth]`, result `[batch * heads][len][depth]`.
    pub(super) fn rows(
        self,
        values: &mut NewValues<f32>,
        [batch, heads, len, depth]: [usize; 4],
    ) -> Vec<Vec<Blank<'_, f32>>> {
        let mut rows: Vec<Vec<Blank<'_, f32>>> = Vec::new();
        rows.resize_with(batch * heads, || Vec::with_capacity(len));
        if depth == 0 {
            rows.iter_mut().for_each(|rows| rows.resize_with(len, Default::default));
            return rows;
        }
        for (index, row) in values.chunks(depth).enumerate() {
            let head = match self {
                Self::Heads => index / len,
                Self::Positions => index / (len * heads) * heads + index % heads,
            };
            rows[head].push(row);
        }
        rows
    }

    /// Returns a tensor of this order with these values.
    pub(super) fn tensor(
        self,
        values: Vec<f32>,
        [batch, heads, len, depth]: [usize; 4],
    ) -> FlexTensor {
        let contiguous = |shape: [usize; 4]| Layout::contiguous(Shape::from(shape.to_vec()));
        let layout = match self {
            Self::Heads => contiguous([batch, heads, len, depth]),
            Self::Positions => contiguous([batch, len, heads, depth]).transpose(1, 2),
        };
        FlexTensor::new(Bytes::from_elems(values), layout, DType::F32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::array::Array;
    use crate::new_values::fill_rows;

    #[test]
    fn rows_are_those_of_the_tensor() {
        let shape @ [batch, heads, len, depth] = [2, 3, 4, 5];
        for order in [Order::Heads, Order::Positions] {
            let mut values = NewValues::new(batch * heads * len * depth);
            for (head, rows) in order.rows(&mut values, shape).into_iter().enumerate() {
                assert_eq!(rows.len(), len);
                for (position, row) in fill_rows(rows, None).into_iter().enumerate() {
                    row.iter_mut().enumerate().for_each(|(index, value)| {
                        *value = ((head * len + position) * depth + index) as f32;
                    });
                }
            }
            let tensor = order.tensor(values.into_vec(), shape);
            assert_eq!(Order::of(&tensor), order);
            let expected: Vec<f32> = (0..batch * heads * len * depth).map(|v| v as f32).collect();
            assert_eq!(Array::new(tensor).values(), expected, "{order:?}");
        }
    }

    #[test]
    fn empty_dimensions_have_empty_rows() {
        for shape in [[0, 2, 3, 4], [2, 0, 3, 4], [2, 3, 0, 4], [2, 3, 4, 0]] {
            for order in [Order::Heads, Order::Positions] {
                let mut values = NewValues::new(0);
                let rows = order.rows(&mut values, shape);
                assert_eq!(rows.len(), shape[0] * shape[1]);
                assert!(rows.iter().all(|rows| rows.len() == shape[2]), "{shape:?}, {order:?}");
            }
        }
    }
}
