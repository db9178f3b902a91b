//! Convolutions whose output goes through a max pool, without a tensor between the two.

use burn::tensor::Tensor;
use burn::tensor::ops::{ConvOptions, MaxPoolOptions};

use super::{Inputs, Method, conv2d, fused, groups};
use crate::activation::{Activation, Kept, apply_relu};
use crate::array::Array;
use crate::chunks::{chunk_rows, map_chunks};
use crate::machine::vectorize;
use crate::new_values::{Blank, NewValues};
use crate::pool::{Pairs, max_pool2d};

/// Returns the maxima of the windows of a convolution with activation, as
/// `max_pool2d(conv2d(x, weight, bias, options, activation), pool)`.
///
/// The result and the gradients are bit-identical. The two are one operator for windows of 2 by 2
/// values with stride 2, dilation 1, no padding and no `ceil_mode`, after a ReLU or no activation.
/// This takes less time and memory: each thread stores the output of the convolution and its
/// gradient for one image at a time. The backward pass needs four bytes for each window.
///
/// # Shapes
///
/// Those of [`conv2d`](crate::conv2d()) and [`max_pool2d`].
///
/// # Panics
///
/// The shapes do not fit.
pub fn conv2d_max_pool2d(
    x: Tensor<4>,
    weight: Tensor<4>,
    bias: Option<Tensor<1>>,
    options: impl Into<ConvOptions<2>>,
    activation: Activation,
    pool: MaxPoolOptions<2>,
) -> Tensor<4> {
    let options = options.into();
    fused(&x, &weight, bias.as_ref(), &options, activation, Some(&pool))
        .unwrap_or_else(|| max_pool2d(conv2d(x, weight, bias, options, activation), pool))
}

/// A max pool after the convolution, with the position of the maximum in each window.
pub(super) struct Positions {
    pub(super) pairs: Pairs,
    positions: Vec<u32>,
}

impl Positions {
    /// Returns the gradient before the pool, of the images whose output starts at `start`.
    pub(super) fn gradient_of_part<'a>(
        &self,
        start: usize,
        dy: &[f32],
        scratch: &'a mut Vec<f32>,
    ) -> &'a [f32] {
        let (plane_in, plane_out) = (self.pairs.plane_in(), self.pairs.plane_out());
        scratch.resize(dy.len() / plane_out * plane_in, 0.0);
        let positions = self.positions[start..start + dy.len()].chunks_exact(plane_out);
        let planes = dy.chunks_exact(plane_out).zip(positions);
        vectorize(
            #[inline(always)]
            || {
                for (dx, (dy, positions)) in scratch.chunks_exact_mut(plane_in).zip(planes) {
                    self.pairs.write_gradient(dy, positions, dx);
                }
            },
        );
        scratch
    }
}

/// Returns the maxima of the windows after the activation, and their positions in the windows.
pub(super) fn forward_pooled(
    method: &impl Method,
    inputs: &Inputs<'_>,
    pairs: Pairs,
) -> (Array, Kept, Positions) {
    let geometry = method.geometry();
    let image_pooled = geometry.channels_out * pairs.plane_out();
    let num = geometry.batch * image_pooled;
    let (mut output, mut positions) = (NewValues::new(num), NewValues::new(num));
    let size = chunk_rows(geometry.batch);
    let parts = output.chunks(size * image_pooled).zip(positions.chunks(size * image_pooled));
    let parts = parts.zip(inputs.x.chunks(size * geometry.image_in())).collect();
    map_chunks(geometry.num_products(), parts, |((output, positions), x)| {
        let (output, positions, x): (Blank<'_, f32>, Blank<'_, u32>, &[f32]) =
            (output, positions, x);
        let mut scratch = method.scratch();
        let outputs = output.filled(image_pooled, 0.0).zip(positions.filled(image_pooled, 0));
        for ((output, positions), x) in outputs.zip(x.chunks_exact(geometry.image_in())) {
            let size = image_pooled / geometry.groups;
            let outputs = output.chunks_exact_mut(size).zip(positions.chunks_exact_mut(size));
            for (outputs, (image, filters)) in outputs.zip(groups(geometry, inputs, x)) {
                method.convolve_pooled(image, &filters, &pairs, outputs, &mut scratch);
            }
            // The ReLU of a maximum is the maximum of ReLUs.
            if inputs.activation == Activation::Relu {
                apply_relu(output);
            }
        }
    });
    let [height, width] = pairs.shape_out();
    let shape = [geometry.batch, geometry.channels_out, height, width];
    let (output, kept) = match inputs.activation {
        Activation::Relu => Kept::relu(output.into_vec(), &shape),
        Activation::Identity => (Array::from_vec(output.into_vec(), &shape), Kept::Nothing),
        Activation::Gelu => unreachable!("GELU and a pool are two operators"),
    };
    (output, kept, Positions { pairs, positions: positions.into_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Case, assert_same_on_threads, run};

    /// Input shape, output channels, size of the kernel and options.
    type Row = ([usize; 4], usize, usize, ConvOptions<2>);

    fn same(stride: [usize; 2], groups: usize) -> ConvOptions<2> {
        ConvOptions::new(stride, [1, 1], [1, 1], groups)
    }

    fn weight_shape((shape, channels_out, kernel, options): &Row) -> [usize; 4] {
        [*channels_out, shape[1] / options.groups, *kernel, *kernel]
    }

    fn case(row: &Row) -> Case {
        Case::new(&[row.0.iter().product(), weight_shape(row).iter().product(), row.1])
    }

    fn pairs() -> MaxPoolOptions<2> {
        MaxPoolOptions::new([2, 2]).with_stride([2, 2])
    }

    /// How the result is computed.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Way {
        OneOperator,
        TwoOperators,
        Public,
    }

    fn operator(
        row: &Row,
        activation: Activation,
        pool: &MaxPoolOptions<2>,
        way: Way,
    ) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
        move |inputs: &[Tensor<1>]| {
            let (x, weight) = (inputs[0].clone(), inputs[1].clone());
            let (x, weight) = (x.reshape(row.0), weight.reshape(weight_shape(row)));
            let (bias, options, pool) = (inputs.get(2).cloned(), row.3.clone(), pool.clone());
            let y = match way {
                Way::OneOperator => {
                    fused(&x, &weight, bias.as_ref(), &options, activation, Some(&pool)).unwrap()
                }
                Way::TwoOperators => max_pool2d(conv2d(x, weight, bias, options, activation), pool),
                Way::Public => conv2d_max_pool2d(x, weight, bias, options, activation, pool),
            };
            let num = y.dims().iter().product::<usize>();
            y.reshape([num])
        }
    }

    /// Compares outputs and gradients with those of two operators.
    #[track_caller]
    fn assert_same(
        case: &Case,
        row: &Row,
        activation: Activation,
        pool: &MaxPoolOptions<2>,
        way: Way,
    ) {
        // Processors do not define which NaN is the sum of two.
        let bits = |values: &[f32]| {
            let bits = |value: &f32| if value.is_nan() { None } else { Some(value.to_bits()) };
            values.iter().map(bits).collect::<Vec<_>>()
        };
        let [ours, expected] =
            [way, Way::TwoOperators].map(|way| run(case, &operator(row, activation, pool, way)));
        let name = format!("{row:?}, {activation:?}, {pool:?}, {} inputs", case.inputs.len());
        assert_eq!(bits(&ours.output), bits(&expected.output), "{name}");
        for (ours, expected) in ours.gradients.iter().zip(&expected.gradients) {
            assert_eq!(bits(ours), bits(expected), "{name}");
        }
    }

    #[test]
    fn one_operator_is_bit_identical_to_two() {
        let rows = [
            ([3, 2, 14, 14], 5, 3, same([1, 1], 1)),
            ([9, 4, 11, 17], 6, 3, same([1, 1], 2)),
            ([1, 1, 28, 28], 16, 3, same([1, 1], 1)),
            ([2, 3, 2, 3], 4, 3, same([1, 1], 1)),
            // Its bias is added to the first of two blocks of a sum.
            ([2, 32, 6, 7], 4, 3, same([1, 1], 1)),
            // Its windows are copied.
            ([2, 4, 9, 13], 4, 3, same([2, 1], 2)),
            // Its image is the matrix of windows.
            ([2, 3, 5, 8], 4, 1, ConvOptions::new([1, 1], [0, 0], [1, 1], 1)),
            ([0, 2, 6, 6], 3, 3, same([1, 1], 1)),
        ];
        // Equal maxima, some of them 0; NaN and infinities; sums that round to 0 or -0.
        let changes: [fn(f32) -> f32; 4] = [
            |value| value,
            f32::round,
            |value| match (value * 100.0) as i32 {
                7 => f32::NAN,
                8 => f32::INFINITY,
                9 => f32::NEG_INFINITY,
                _ => value,
            },
            |value| value * 1e-30,
        ];
        for row in &rows {
            for change in changes {
                let mut case = case(row);
                case.inputs.iter_mut().flatten().for_each(|value| *value = change(*value));
                for num_inputs in [3, 2] {
                    case.inputs.truncate(num_inputs);
                    for activation in [Activation::Identity, Activation::Relu] {
                        assert_same(&case, row, activation, &pairs(), Way::OneOperator);
                    }
                }
            }
        }
    }

    #[test]
    fn other_pools_and_gelu_are_two_operators() {
        let row = ([2, 2, 8, 8], 3, 3, same([1, 1], 1));
        let device = crate::testing::device();
        let (x, weight) = (Tensor::ones(row.0, &device), Tensor::ones(weight_shape(&row), &device));
        let wide = MaxPoolOptions::new([3, 3]).with_stride([2, 2]);
        for (activation, pool) in [
            (Activation::Gelu, pairs()),
            (Activation::Relu, wide),
            (Activation::Relu, pairs().with_padding([1, 1])),
            (Activation::Relu, pairs().with_ceil_mode(true)),
        ] {
            assert!(fused(&x, &weight, None, &row.3, activation, Some(&pool)).is_none());
            assert_same(&case(&row), &row, activation, &pool, Way::Public);
        }
        let flat = ([2, 2, 1, 4], 3, 3, same([1, 1], 1));
        let row_pool = MaxPoolOptions::new([1, 2]).with_stride([1, 2]);
        assert_same(&case(&flat), &flat, Activation::Relu, &row_pool, Way::Public);
        assert_same(&case(&row), &row, Activation::Relu, &pairs(), Way::Public);
    }

    /// The first layer of a model has an input without gradient, and predictions have none at all.
    #[test]
    fn inputs_without_gradient_change_no_bits() {
        let row = ([3, 2, 14, 14], 5, 3, same([1, 1], 1));
        let (case, pool) = (case(&row), pairs());
        let operator = operator(&row, Activation::Relu, &pool, Way::OneOperator);
        let expected = run(&case, &operator);
        let first = run(&case, &|inputs: &[Tensor<1>]| {
            // `run` reads a gradient of each input: here 0.
            let kept = inputs[0].clone().sum() * 0.0;
            let x = inputs[0].clone().detach();
            operator(&[x, inputs[1].clone(), inputs[2].clone()]) + kept
        });
        assert_eq!(first.output, expected.output);
        assert_eq!(first.gradients[1..], expected.gradients[1..]);
        let output = operator(&case.tensors(&crate::testing::device()));
        assert_eq!(output.into_data().try_to_vec::<f32>().unwrap(), expected.output);
    }

    #[test]
    fn threads_do_not_change_bits() {
        for batch in [1, 13] {
            let row = ([batch, 16, 28, 28], 24, 3, same([1, 1], 1));
            let pool = pairs();
            let operator = operator(&row, Activation::Relu, &pool, Way::OneOperator);
            assert_same_on_threads(&case(&row), &operator);
        }
    }
}
